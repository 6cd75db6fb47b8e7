// Requests to this server, with the API key if there is one, and server-sent events.

const KEY = "pagespec-key";

// Called when a server refuses a request, with whether that had a key: a promise of whether there is
// another one now.
let askForKey = async () => false;

export function onKeyNeeded(ask) {
  askForKey = ask;
}

export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => {
    sessionStorage.setItem(KEY, value);
    dispatchEvent(new Event("pagespec-key"));
  },
};

export class ServerError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

// The response of `path`, which is relative to the page: it may stand below a proxy's path.
export async function request(path, { body, signal } = {}) {
  for (;;) {
    const headers = {};
    const sent = key.get();
    if (sent) headers.Authorization = `Bearer ${sent}`;
    if (body !== undefined) headers["Content-Type"] = "application/json";
    const response = await fetch(new URL(path, document.baseURI), {
      method: body === undefined ? "GET" : "POST",
      headers,
      body: body === undefined ? undefined : JSON.stringify(body),
      signal,
      cache: "no-store",
    });
    if (response.ok) return response;
    // Another request may have asked for one meanwhile.
    const isRefused = response.status === 401;
    if (isRefused && (key.get() !== sent || (await askForKey(sent !== "")))) continue;
    throw new ServerError(response.status, await messageOf(response));
  }
}

async function messageOf(response) {
  const text = await response.text();
  const wait = response.headers.get("Retry-After");
  let message = text;
  try {
    const { error } = JSON.parse(text);
    message = typeof error === "string" ? error : error.message;
  } catch {
    // Not ours: a proxy's.
  }
  message = message?.slice(0, 500) || `${response.status} ${response.statusText}`;
  return wait ? `${message} (try again in ${wait} s)` : message;
}

// The data of each server-sent event. EventSource cannot send a key.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const parts = (rest + value).split(/\r?\n\r?\n/);
      rest = parts.pop();
      for (const part of parts) {
        const lines = part.split(/\r?\n/).filter((line) => line.startsWith("data:"));
        if (lines.length) yield lines.map((line) => line.slice(5).replace(/^ /, "")).join("\n");
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
