// The buttons of a run, the dialog of commands with arguments, and the answers.

import { element, setText, timeOf } from "./parts.js";

const MOODS = { waiting: "busy", applied: "good", refused: "bad", "no answer": "bad" };
const SHOWN = 3;

const BUTTONS = [
  { name: "Checkpoint", title: "Save a checkpoint", make: () => ({ command: "checkpoint" }) },
  { name: "Validate", title: "Validate now", make: () => ({ command: "validate" }) },
  { name: "Pause", title: "Wait after this iteration", when: "running", make: () => ({ command: "pause" }) },
  { name: "Go on", title: "Go on after the pause", when: "paused", make: () => ({ command: "go" }) },
  { name: "Trace", title: "Record the next 20 iterations as a file for Perfetto", make: () => ({ command: "trace" }) },
  {
    name: "Set…", title: "Set the learning rate, or another number", label: "NAME=VALUE", value: "lr=",
    hint: "Such as lr=1e-4, lr*=0.5, weight_decay=0.1 or early_stopping.patience=5; several with spaces between.",
    make: (text) => ({ command: "set", ...split(words(text)) }),
  },
  {
    name: "Note…", title: "Log a text at this iteration", label: "Text", value: "",
    hint: "The text is logged with the metrics, at this iteration.",
    make: (text) => ({ command: "note", words: [text] }),
  },
  {
    name: "Other…", title: "Send another command, such as one of the run’s own program", label: "Command", value: "help",
    hint: "As after eventloop tell RUN; help lists all commands of this run, stacks shows where its threads stand.",
    make: (text) => {
      const [command, ...rest] = words(text);
      return ["note", "stop"].includes(command)
        ? { command, words: rest.length ? [rest.join(" ")] : [] }
        : { command, ...split(rest) };
    },
  },
  {
    name: "Stop…", title: "Stop the run", label: "Reason", value: "", danger: true, optional: true,
    hint: "The run ends after this iteration, with its closing events and the last checkpoint.",
    make: (text) => ({ command: "stop", words: text ? [text] : [] }),
  },
];

// Return the words of a text; a word in quotes may have spaces.
function words(text) {
  return [...text.matchAll(/(?:[^\s"']+|"[^"]*"|'[^']*')+/g)].map(([word]) => word.replace(/"([^"]*)"|'([^']*)'/g, "$1$2"));
}

function split(all) {
  const named = all.filter((word) => /^[^\s=]+=/.test(word));
  const pairs = named.map((word) => [word.slice(0, word.indexOf("=")), word.slice(word.indexOf("=") + 1)]);
  return { words: all.filter((word) => !named.includes(word)), arguments: Object.fromEntries(pairs) };
}

export class Commands {
  constructor(number, article, token) {
    this.number = number;
    this.token = token;
    this.answers = article.querySelector(".answers");
    this.failed = [];
    this.buttons = BUTTONS.map((spec) => {
      const button = element("button", { type: "button", title: spec.title, text: spec.name });
      if (spec.danger) button.classList.add("danger");
      button.addEventListener("click", async () => {
        const text = spec.label ? await request(spec) : "";
        if (text !== null) this.send(spec.make(text));
      });
      return button;
    });
    article.querySelector(".actions").append(...this.buttons);
  }

  name(run) {
    this.buttons[0].parentElement.setAttribute("aria-label", `Commands to ${run}`);
  }

  enable(head) {
    BUTTONS.forEach((spec, at) => {
      this.buttons[at].disabled = head.over;
      if (spec.when) this.buttons[at].hidden = (spec.when === "paused") !== head.paused;
    });
  }

  async send(command) {
    try {
      const response = await fetch("/command", {
        method: "POST",
        headers: { "Content-Type": "application/json", "X-Eventloop-Token": this.token },
        body: JSON.stringify({ run: this.number, ...command }),
      });
      if (!response.ok) this.fail(command, (await response.json()).error);
    } catch (error) {
      this.fail(command, `not sent: ${error.message}`);
    }
  }

  fail(command, answer) {
    this.failed.push({ text: command.command, time: Date.now() / 1000, outcome: "refused", answer });
    this.show(this.sent ?? []);
  }

  show(sent) {
    this.sent = sent;
    const all = [...sent, ...this.failed].sort((a, b) => b.time - a.time).slice(0, SHOWN);
    this.answers.replaceChildren(...all.map((each) => element("li", {},
      element("time", { text: timeOf(each.time) }), element("code", { text: each.text }),
      element("span", { class: `outcome ${MOODS[each.outcome]}`, text: each.outcome }),
      ...(each.answer ? [element("span", { class: "text", text: each.answer })] : []))));
  }
}

// Show the dialog, and return the text; null if it was cancelled.
function request(spec) {
  const dialog = document.getElementById("dialog");
  const input = document.getElementById("dialog-value");
  const send = document.getElementById("dialog-send");
  setText(document.getElementById("dialog-title"), spec.title);
  setText(document.getElementById("dialog-hint"), spec.hint);
  setText(document.getElementById("dialog-label"), spec.label + (spec.optional ? " (may be empty)" : ""));
  setText(send, spec.danger ? "Stop" : "Send");
  send.classList.toggle("danger", Boolean(spec.danger));
  input.value = spec.value;
  input.required = !spec.optional;
  document.getElementById("dialog-cancel").onclick = () => dialog.close("");
  dialog.returnValue = "";
  send.value = "send";
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "send" ? input.value.trim() : null), { once: true });
    dialog.showModal();
    input.focus();
    input.setSelectionRange(input.value.length, input.value.length);
  });
}
