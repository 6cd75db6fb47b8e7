// The conversation: sends what was written, shows the answer as it comes.

import { events, request } from "./api.js";
import { copyButton } from "./copy.js";
import { element, render } from "./markdown.js";

const SETTINGS = "pagespec-settings";
const find = (id) => document.getElementById(id);

export class Chat {
  #messages = []; // of role and content
  #model = null;
  #abort = null; // while an answer comes
  #form = find("composer");
  #input = find("input");
  #log = find("log");

  constructor() {
    this.#form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#send(this.#input.value);
    });
    this.#input.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.#send(this.#input.value);
      }
    });
    this.#input.addEventListener("input", () => this.#fit());
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && !document.querySelector("dialog[open]")) this.#abort?.abort();
    });
    find("stop").addEventListener("click", () => this.#abort?.abort());
    find("new").addEventListener("click", () => this.#clear());
    for (const idea of find("ideas").children) {
      idea.addEventListener("click", () => this.#send(idea.textContent));
    }
    this.#restoreSettings();
  }

  setModel(model) {
    if (this.#model?.name === model.name) return;
    this.#model = model;
    this.#form.elements.max_tokens.max = model.max_model_len;
    if (model.has_chat_template) return;
    find("hint").textContent =
      "This model has no chat template: it continues the text that you give it.";
    this.#input.placeholder = "Text to continue";
    this.#form.elements.system.closest("label").hidden = true;
  }

  // The parameters that are set; what is left empty is the server's default.
  #params() {
    const fields = this.#form.elements;
    const params = {};
    for (const name of ["temperature", "top_p", "max_tokens", "seed"]) {
      if (fields[name].value !== "") params[name] = Number(fields[name].value);
    }
    const stop = fields.stop.value.split("\n").filter((line) => line !== "");
    if (stop.length) params.stop = stop;
    return params;
  }

  #restoreSettings() {
    const fields = [...this.#form.querySelectorAll("[name]")];
    const saved = JSON.parse(localStorage.getItem(SETTINGS) ?? "{}");
    for (const field of fields) {
      if (field.name in saved) field.value = saved[field.name];
      field.addEventListener("change", () => {
        const now = Object.fromEntries(fields.map((one) => [one.name, one.value]));
        localStorage.setItem(SETTINGS, JSON.stringify(now));
      });
    }
  }

  #clear() {
    this.#abort?.abort();
    this.#messages = [];
    for (const shown of this.#log.querySelectorAll(".message")) shown.remove();
    find("welcome").hidden = false;
    this.#input.focus();
  }

  #send(text) {
    const isBad = [...this.#form.querySelectorAll("[name]")].find((one) => !one.checkValidity());
    if (isBad) {
      find("settings").open = true;
      isBad.reportValidity();
      return;
    }
    if (this.#abort || text.trim() === "") return;
    this.#input.value = "";
    this.#fit();
    find("welcome").hidden = true;
    this.#dropUnanswered();
    this.#messages.push({ role: "user", content: text });
    this.#show("user", text);
    this.#answer();
  }

  #regenerate() {
    if (this.#abort) return;
    if (this.#messages.at(-1).role === "assistant") this.#messages.pop();
    this.#log.querySelector(".message:last-of-type").remove();
    this.#answer();
  }

  // A message without an answer is not sent again: templates want an answer between two messages.
  #dropUnanswered() {
    if (this.#messages.at(-1)?.role === "user") this.#messages.pop();
  }

  async #answer() {
    // Only the last answer can be had again.
    for (const old of this.#log.querySelectorAll(".regenerate")) old.remove();
    const shown = this.#show("assistant", "");
    const answer = new Answer(shown, () => this.#regenerate());
    this.#setBusy(new AbortController());
    const wasAtEnd = () =>
      this.#log.scrollHeight - this.#log.scrollTop - this.#log.clientHeight < 60;
    try {
      const { path, body } = this.#request();
      const response = await request(path, { body, signal: this.#abort.signal });
      for await (const data of events(response)) {
        if (data === "[DONE]") break;
        const stays = wasAtEnd();
        answer.add(JSON.parse(data));
        if (stays) this.#log.scrollTop = this.#log.scrollHeight;
      }
      answer.end();
    } catch (error) {
      if (error.name === "AbortError") answer.end("stopped");
      else answer.fail(error.message);
    }
    // The place of a conversation that was cleared meanwhile is gone.
    if (shown.isConnected) {
      if (answer.isAnswer) this.#messages.push({ role: "assistant", content: answer.text });
      this.#log.scrollTop = this.#log.scrollHeight;
    }
    this.#setBusy(null);
  }

  #request() {
    const common = {
      ...this.#params(),
      stream: true,
      stream_options: { include_usage: true },
    };
    if (this.#model) common.model = this.#model.name;
    if (this.#model && !this.#model.has_chat_template) {
      const prompt = this.#messages.at(-1).content;
      return { path: "v1/completions", body: { ...common, prompt } };
    }
    const system = this.#form.elements.system.value;
    const messages = system ? [{ role: "system", content: system }] : [];
    return {
      path: "v1/chat/completions",
      body: { ...common, messages: [...messages, ...this.#messages] },
    };
  }

  #show(role, text) {
    const message = element("article", `message ${role}`);
    message.append(element("h3", "", role === "user" ? "You" : "Model"));
    const body = element("div", "body");
    if (role === "user") body.textContent = text;
    message.append(body);
    this.#log.append(message);
    this.#log.scrollTop = this.#log.scrollHeight;
    return message;
  }

  #setBusy(abort) {
    const isFocused = [find("send"), find("stop")].includes(document.activeElement);
    this.#abort = abort;
    find("send").hidden = abort !== null;
    find("stop").hidden = abort === null;
    this.#log.setAttribute("aria-busy", abort !== null);
    if (isFocused) (abort ? find("stop") : this.#input).focus();
  }

  #fit() {
    this.#input.style.height = "auto";
    this.#input.style.height = `${Math.min(this.#input.scrollHeight, 200)}px`;
  }
}

// One answer while it comes, and its figures.
class Answer {
  text = "";
  #reasoning = "";
  #begin = performance.now();
  #first = null;
  #last = null;
  #numChunks = 0;
  #usage = null;
  #reason = "";
  #isDrawn = true;

  constructor(shown, regenerate) {
    this.shown = shown;
    this.body = shown.querySelector(".body");
    this.body.append(element("span", "typing"));
    this.footer = element("footer", "");
    this.figures = element("span", "figures");
    const copy = copyButton("plain", () => this.text);
    const again = element("button", "plain regenerate", "Regenerate");
    again.type = "button";
    again.addEventListener("click", regenerate);
    this.footer.append(this.figures, copy, again);
    this.footer.hidden = true;
    shown.append(this.footer);
  }

  // Whether it is a part of the conversation: one that failed or was stopped may have no text.
  get isAnswer() {
    return this.text !== "" || !["stopped", "failed"].includes(this.#reason);
  }

  add(chunk) {
    if (chunk.error) throw new Error(chunk.error.message ?? chunk.error);
    if (chunk.usage) this.#usage = chunk.usage;
    const choice = chunk.choices?.[0];
    if (!choice) return;
    const delta = choice.delta ?? { content: choice.text };
    const reasoning = delta.reasoning_content ?? delta.reasoning ?? "";
    if (choice.finish_reason) this.#reason = choice.finish_reason;
    if (!delta.content && !reasoning) return;
    this.#last = performance.now();
    this.#first ??= this.#last;
    this.#numChunks += 1;
    this.text += delta.content ?? "";
    this.#reasoning += reasoning;
    if (this.#isDrawn) {
      this.#isDrawn = false;
      requestAnimationFrame(() => this.#draw());
    }
  }

  end(reason) {
    this.#draw();
    if (reason) this.#reason = reason;
    this.shown.dataset.ended = this.#reason || "ended";
    this.figures.textContent = this.#figures().join(" · ");
    this.footer.hidden = false;
  }

  fail(message) {
    this.end("failed");
    const error = element("p", "error", message);
    error.setAttribute("role", "alert");
    this.body.append(error);
  }

  #figures() {
    const numTokens = this.#usage?.completion_tokens ?? this.#numChunks;
    const found = [];
    if (numTokens) found.push(`${numTokens} token${numTokens === 1 ? "" : "s"}`);
    if (this.#last > this.#first && numTokens > 1) {
      const rate = (1000 * (numTokens - 1)) / (this.#last - this.#first);
      found.push(`${rate.toFixed(rate < 10 ? 1 : 0)} tokens/s`);
    }
    if (this.#first !== null) {
      found.push(`first after ${((this.#first - this.#begin) / 1000).toFixed(2)} s`);
    }
    const words = { length: "cut at most tokens", stopped: "stopped", failed: "failed" };
    if (words[this.#reason]) found.push(words[this.#reason]);
    return found;
  }

  #draw() {
    this.#isDrawn = true;
    const parts = [];
    if (this.#reasoning) {
      const fold = this.body.querySelector(".reasoning") ?? element("details", "reasoning");
      if (!fold.firstChild) fold.append(element("summary", "", "Reasoning"), element("div", ""));
      fold.lastChild.textContent = this.#reasoning;
      parts.push(fold);
    }
    parts.push(...render(this.text));
    this.body.replaceChildren(...parts);
  }
}
