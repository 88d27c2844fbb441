// Talks to the server that this page came from.

const KEY = "lmlib-api-key";
export const hasKey = () => sessionStorage.getItem(KEY) !== null;

function askForKey(text) {
  const dialog = document.getElementById("key-dialog"), field = document.getElementById("key");
  if (text) document.getElementById("key-text").textContent = text;
  field.value = "";
  dialog.showModal();
  return new Promise((resolve, reject) => {
    dialog.onclose = () => {
      if (!field.value) return reject(new Error("this server asks for an API key"));
      sessionStorage.setItem(KEY, field.value);
      resolve();
    };
  });
}

let asking = null; // so that two requests ask for the key once

// Returns the response; throws an error with the server's sentence.
export async function request(path, settings = {}) {
  for (;;) {
    const key = sessionStorage.getItem(KEY), headers = { "Content-Type": "application/json" };
    if (key) headers.Authorization = `Bearer ${key.replace(/[^!-~]/g, "")}`;
    const response = await fetch(path, { ...settings, headers }).catch((error) => {
      throw error.name === "AbortError" ? error : new Error("The server does not answer.");
    });
    if (response.ok) return response;
    const said = await response.json().catch(() => null);
    const text = said?.error?.message ?? `The server answered ${response.status}.`;
    if (response.status !== 401)
      throw Object.assign(new Error(text), { code: said?.error?.code });
    asking ??= askForKey(key ? text : "").finally(() => (asking = null));
    await asking;
  }
}

// Yields the events of a streamed answer.
export async function* stream(path, body, signal) {
  const response = await request(path, { method: "POST", body: JSON.stringify(body), signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ; ) {
    const { done, value } = await reader.read();
    if (done) throw new Error("The connection ended before the answer.");
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const data = event.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const found = JSON.parse(data);
      if (found.error) throw new Error(found.error.message);
      yield found;
    }
  }
}
