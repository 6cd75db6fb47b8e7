// The page: theme, key, which view a phone shows; chat and live view are in their own files.

import { key, onKeyNeeded } from "./api.js";
import { Chat } from "./chat.js";
import { LiveView } from "./live.js";

const THEME = "pagespec-theme";
const find = (id) => document.getElementById(id);

function startTheme(onChange) {
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
  const chosen = localStorage.getItem(THEME);
  if (chosen) root.dataset.theme = chosen;
  system.addEventListener("change", onChange);
  find("theme").addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    localStorage.setItem(THEME, root.dataset.theme);
    onChange();
  });
}

function startViews(onChange) {
  const buttons = [...document.querySelectorAll(".views button")];
  for (const button of buttons) {
    button.addEventListener("click", () => {
      document.body.dataset.view = button.dataset.view;
      for (const other of buttons) other.setAttribute("aria-pressed", other === button);
      onChange();
    });
  }
}

function startKey() {
  const dialog = find("key-dialog");
  const input = find("key-input");
  const refusal = find("key-refused");
  let asking = null;
  // One question, however many requests were refused meanwhile.
  const ask = (isRefused) => {
    refusal.textContent = isRefused ? "The server refuses this key." : "";
    asking ??= new Promise((resolve) => {
      input.value = "";
      dialog.returnValue = "";
      dialog.addEventListener(
        "close",
        () => {
          asking = null;
          const isGiven = dialog.returnValue === "ok" && input.value.trim() !== "";
          if (isGiven) key.set(input.value.trim());
          input.value = "";
          resolve(isGiven);
        },
        { once: true },
      );
      dialog.showModal();
      input.focus();
    });
    return asking;
  };
  // Enter would press the form's first button, Cancel.
  input.addEventListener("keydown", (event) => {
    if (event.key !== "Enter") return;
    event.preventDefault();
    dialog.close("ok");
  });
  find("key").addEventListener("click", () => ask(false));
  onKeyNeeded(ask);
}

const live = new LiveView(find("engine"));
const chat = new Chat();
startTheme(() => live.draw());
startViews(() => live.draw());
startKey();
live.onFrame = (frame) => {
  find("model").textContent = frame.model.name;
  chat.setModel(frame.model);
};
live.onState = (state) => {
  const shown = find("state");
  // Written only when it changes: a screen reader says it.
  if (shown.dataset.state === state) return;
  shown.dataset.state = state;
  shown.textContent = shown.title = state;
};
live.run();
