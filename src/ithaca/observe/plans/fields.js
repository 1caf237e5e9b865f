// What a set-up is asked for: fields, and the words they stand for. Words by name are what the link has and what the server reads.

const NAMES = [
  "model", "gpus", "context", "rows", "accumulation", "host", "disk", "optimizer", "offload_optimizer", "lora", "lora_targets",
  "quantize", "synchronous", "deterministic", "kernel", "stack", "tokens", "price",
];

// The fields of one set-up. changed(later): something else is asked; later: wait for more to be typed.
class Fields {
  constructor(place, title, words, choices, changed) {
    this.place = place;
    this.changed = changed;
    this.inputs = {};
    this.problems = {};
    const [, count, gpu] = /^\s*((?:\d+\s*x\s*)*\d+)\s*x\s*(.+)$/i.exec(words.gpus || "") || ["", "", words.gpus || ""];
    const lora = Number(words.lora) > 0;
    this.form = h(
      "form",
      { class: "ask", "aria-label": title, autocomplete: "off", novalidate: true, onsubmit: (event) => this.submit(event) },
      h("h2", {}, title),
      h(
        "div",
        { class: "group" },
        this.text("model", "Model", words.model, {
          wide: true, options: choices.models.map((each) => [each.name, each.about]),
          hint: "a preset, a folder with config.json, or owner/name",
        }),
        this.text("gpu", "GPU", gpu, { options: choices.gpus.map((name) => [name, ""]) }),
        this.stepper("count", "Number of GPUs", count, "2x8: two machines"),
        this.stepper("context", "Context", words.context, "tokens: 512K, 3M", choices.contexts),
        this.text("rows", "Rows a step", words.rows, { placeholder: "1", numeric: true }),
        this.kinds(lora, words.lora),
        this.text("host", "Host memory of a machine", words.host, { placeholder: "what is usual", wide: true }),
      ),
      h(
        "details",
        { class: "more", open: ["accumulation", "disk", "optimizer", "offload_optimizer", "lora_targets", "quantize", "synchronous", "deterministic", "kernel", "stack"].some((name) => words[name]) },
        h("summary", {}, "More of the run"),
        h(
          "div",
          { class: "group" },
          this.select("optimizer", "Optimizer", words.optimizer, choices.optimizers.map((name, at) => [at ? name : "", name])),
          this.text("accumulation", "Micro-batches a step", words.accumulation, { placeholder: "1", numeric: true }),
          this.text("disk", "Scratch disk of a machine", words.disk, { placeholder: "none" }),
          this.select("kernel", "Attention kernel", words.kernel, [["", "what the engine takes"], ...choices.kernels.map((name) => [name, name])]),
          this.text("stack", "Fields of the stack that stay", words.stack, { placeholder: "tile=8K, recompute=layer", wide: true }),
          this.text("lora_targets", "Linear layers with an adapter", words.lora_targets, { placeholder: "all of a layer", wide: true }),
          this.select("quantize", "Base under adapters", words.quantize, [["", "bf16"], ["nf4", "NF4: four bits (QLoRA)"]]),
          this.select("offload_optimizer", "Weights and states wait", words.offload_optimizer, [["", "on the GPU, if they fit"], ["no", "on the GPU"], ["yes", "in host memory"]]),
          this.check("synchronous", "Checkpoints are waited for", words.synchronous),
          this.check("deterministic", "The same bits on every run", words.deterministic),
        ),
      ),
      h(
        "fieldset",
        { class: "group cost" },
        h("legend", {}, "What it costs"),
        this.text("tokens", "Tokens to train on", words.tokens, { placeholder: "10B", hint: "here 1B = 10⁹" }),
        this.text("price", "Price of a GPU-hour", words.price, { placeholder: "2.50" }),
      ),
    );
  }

  // What the fields say now. Empty ones are left out.
  words() {
    const value = (name) => this.inputs[name].value.trim();
    const words = {};
    for (const name of NAMES) {
      if (name === "gpus") words.gpus = value("gpu") && (value("count") ? `${value("count")}x${value("gpu")}` : value("gpu"));
      else if (name === "lora") words.lora = this.inputs.adapters.checked ? value("lora") || "16" : "";
      else if (this.inputs[name].type === "checkbox") words[name] = this.inputs[name].checked ? "yes" : "";
      else words[name] = value(name);
    }
    if (!words.lora) words.lora_targets = words.quantize = "";
    return Object.fromEntries(Object.entries(words).filter(([, word]) => word));
  }

  // Other words for some fields, as advice and the grid give them. The first field that changes has the focus then.
  set(change) {
    const shown = [];
    for (const [name, word] of Object.entries(change)) {
      if (name === "gpus") {
        const [, count, gpu] = /^((?:\d+x)*\d+)x(.+)$/i.exec(word);
        this.inputs.count.value = count;
        this.inputs.gpu.value = gpu;
        shown.push(this.inputs.count);
      } else if (name === "lora") {
        this.inputs.adapters.checked = true;
        this.inputs.lora.value = word;
        this.kind();
        shown.push(this.inputs.lora);
      } else {
        if (this.inputs[name].type === "checkbox") this.inputs[name].checked = word === "yes";
        else this.inputs[name].value = word;
        const fold = this.inputs[name].closest("details");
        if (fold) fold.open = true;
        shown.push(this.inputs[name]);
      }
    }
    shown[0]?.focus();
    this.changed(false);
  }

  // problems: by field; what belongs to none is said with the verdict.
  complain(problems) {
    for (const [name, place] of Object.entries(this.problems)) {
      const found = problems[name] || (name === "count" && !this.inputs.count.value.trim() ? null : name === "count" ? problems.gpus : null);
      place.textContent = found || "";
      place.hidden = !found;
      if (found) this.inputs[name].setAttribute("aria-invalid", "true");
      else this.inputs[name].removeAttribute("aria-invalid");
    }
    const fold = this.form.querySelector(".more [aria-invalid]");
    if (fold) fold.closest("details").open = true;
  }

  submit(event) {
    event.preventDefault();
    this.changed(false);
  }

  text(name, label, value, { wide, options, placeholder, hint, numeric } = {}) {
    const id = `${this.place}-${name}`;
    const list = options ? h("datalist", { id: `${id}-list` }, options.map(([word, about]) => h("option", { value: word, label: about || null }))) : null;
    const known = new Set((options || []).map(([word]) => word));
    const input = h("input", {
      id, type: "text", value: value || "", placeholder, list: list && list.id, spellcheck: "false", autocapitalize: "off",
      inputmode: numeric ? "numeric" : null, "aria-describedby": `${id}-problem${hint ? ` ${id}-hint` : ""}`,
      // a folder or a name of the Hub is looked for when it is whole, not letter by letter
      oninput: () => (name === "model" && !known.has(input.value.trim()) ? null : this.changed(true)),
      onchange: () => this.changed(false),
    });
    this.inputs[name] = input;
    return this.row(name, h("label", { for: id }, label), [input, list], wide, hint);
  }

  // A field with a button on each side: half and double.
  stepper(name, label, value, hint, options = null) {
    const id = `${this.place}-${name}`;
    const list = options ? h("datalist", { id: `${id}-list` }, options.map((word) => h("option", { value: word }))) : null;
    const input = h("input", {
      id, type: "text", value: value || "", list: list && list.id, spellcheck: "false", inputmode: options ? null : "numeric",
      "aria-describedby": `${id}-problem ${id}-hint`, placeholder: options ? "1M" : "1",
      oninput: () => this.changed(true),
      onchange: () => this.changed(false),
    });
    const step = (factor) => {
      const next = scaledWord(input.value.trim() || "1", factor);
      if (next === null) return;
      input.value = next;
      this.changed(true);
    };
    this.inputs[name] = input;
    const button = (text, words, factor) =>
      h("button", { type: "button", class: "step", "aria-label": words, title: words, onclick: () => step(factor) }, text);
    const what = options ? "the context" : "the GPUs";
    const row = h("div", { class: "stepper" }, button("½", `half ${what}`, 0.5), input, button("2×", `twice ${what}`, 2));
    return this.row(name, h("label", { for: id }, label), [row, list], false, hint);
  }

  kinds(lora, rank) {
    const radio = (name, checked, label) => {
      const id = `${this.place}-${name}`;
      const input = h("input", { id, type: "radio", name: `${this.place}-kind`, checked, onchange: () => (this.kind(), this.changed(false)) });
      this.inputs[name] = input;
      return [input, h("label", { for: id }, label)];
    };
    this.inputs.lora = h("input", {
      id: `${this.place}-lora`, type: "text", inputmode: "numeric", value: lora ? rank : "16", "aria-label": "Rank of the adapters",
      "aria-describedby": `${this.place}-lora-problem`, oninput: () => this.changed(true), onchange: () => this.changed(false),
    });
    this.rank = h("span", { class: "rank" }, "rank ", this.inputs.lora);
    const row = h(
      "fieldset",
      { class: "field wide" },
      h("legend", {}, "Trained"),
      h("div", { class: "kinds" }, h("span", { class: "switch" }, radio("whole", !lora, "all weights"), radio("adapters", lora, "LoRA")), this.rank),
      this.problem("lora"),
    );
    this.kind();
    return row;
  }

  kind() {
    this.rank.hidden = !this.inputs.adapters.checked;
  }

  select(name, label, value, options) {
    const id = `${this.place}-${name}`;
    const input = h("select", { id, onchange: () => this.changed(false), "aria-describedby": `${id}-problem` }, options.map(([word, text]) => h("option", { value: word, selected: word === (value || "") }, text)));
    this.inputs[name] = input;
    return this.row(name, h("label", { for: id }, label), [input]);
  }

  check(name, label, value) {
    const id = `${this.place}-${name}`;
    this.inputs[name] = h("input", { id, type: "checkbox", checked: value === "yes", onchange: () => this.changed(false) });
    return h("div", { class: "field wide check" }, this.inputs[name], h("label", { for: id }, label));
  }

  row(name, label, children, wide = false, hint = null) {
    return h("div", { class: `field${wide ? " wide" : ""}` }, label, children, hint ? h("small", { class: "hint", id: `${this.place}-${name}-hint` }, hint) : null, this.problem(name));
  }

  problem(name) {
    const place = h("small", { class: "problem", id: `${this.place}-${name}-problem`, hidden: true });
    this.problems[name === "gpu" ? "gpus" : name] = place;
    if (name === "gpu") this.inputs.gpus = this.inputs.gpu;
    return place;
  }
}

// "512K" twice is "1M", and "2x8" GPUs are "4x8". null: no number.
function scaledWord(word, factor) {
  const match = /^((?:\d+\s*x\s*)?)(\d+(?:\.\d+)?)\s*([kmg]?)$/i.exec(word);
  if (!match) return null;
  if (match[1]) {
    const machines = Math.max(1, Math.round(parseInt(match[1], 10) * factor));
    return machines > 1 ? `${machines}x${match[2]}` : match[2];
  }
  const size = { "": 1, k: 2 ** 10, m: 2 ** 20, g: 2 ** 30 }[match[3].toLowerCase()];
  const value = Math.max(1, Math.round(Number(match[2]) * size * factor));
  return match[3] || value >= 65536 ? show.tokens(value).replaceAll(",", "") : String(value);
}
