// The button that copies a text.

const SHOWN_MS = 1500;

export function copyButton(className, text) {
  const button = document.createElement("button");
  button.type = "button";
  button.className = className;
  button.textContent = "Copy";
  button.addEventListener("click", async () => {
    button.textContent = (await copy(text())) ? "Copied" : "Not copied";
    setTimeout(() => (button.textContent = "Copy"), SHOWN_MS);
  });
  return button;
}

// Whether the text is in the clipboard. Browsers have navigator.clipboard for HTTPS and localhost
// only, and may refuse it there.
async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copySelected(text);
  }
}

function copySelected(text) {
  const focused = document.activeElement;
  const field = document.createElement("textarea");
  field.className = "copied";
  field.value = text;
  field.readOnly = true;
  document.body.append(field);
  field.select();
  try {
    return document.execCommand("copy");
  } catch {
    return false;
  } finally {
    field.remove();
    focused?.focus();
  }
}
