// The page: one set-up or two, each with its fields and what the planner says. Answers that come too late are dropped.

const data = JSON.parse(document.getElementById("data").textContent);
data.categories.forEach((name) => KNOWN.add(name));
const main = document.getElementById("main");
const TYPING = 70; // milliseconds without a key before the planner is asked
const PAUSE = 450; // without a new answer, before what takes longer is asked for
const PATIENCE = 250; // before the page says that it waits
const page = Math.random().toString(36).slice(2);

function noPieces() {
  return { cells: [] };
}

// A piece of a longer answer, put where the drawing looks for it.
function keep(pieces, piece) {
  if (piece.part === "cell") pieces.cells.push(piece.value);
  else if (piece.part === "grid") [pieces.grid, pieces.cells] = [piece.value, []];
  else {
    pieces[piece.part] = piece.value;
    if (piece.value === null) pieces[`${piece.part}Why`] = piece.why;
  }
}

class Setup {
  constructor(place, words) {
    this.place = place;
    this.answer = null;
    this.pieces = noPieces();
    this.title = h("h2", { class: "setup-title" });
    this.facts = h("div", {});
    this.verdict = h("div", { class: "verdict-box", role: "status", "aria-live": "polite" });
    this.said = h("p", { class: "said", hidden: true });
    const box = (name) => h("div", { class: name });
    [this.top, this.asked, this.charts, this.side, this.rungs, this.map, this.rest] = ["top-figures", "asked", "charts", "pair", "rungs", "map-box", "rest"].map(box);
    this.keys = box("keys-box");
    this.memory = h("div", { class: "memory" }, this.keys, this.charts, this.side, this.map, this.rungs); // as far as the legend stays in view
    this.result = h("div", { class: "result" }, this.title, this.facts, this.verdict, this.said, this.top, this.asked, this.memory, this.rest);
    this.fields = data.live ? new Fields(place, "Set-up", words, data.choices, (later) => this.change(later)) : null;
    this.section = h("section", { class: "setup", "data-setup": place }, this.fields && this.fields.form, this.result);
    this.title.hidden = data.live;
  }

  name(text) {
    if (!this.fields) return;
    this.fields.form.querySelector("h2").textContent = text;
    this.fields.form.setAttribute("aria-label", text);
  }

  change(later) {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.ask(), later ? TYPING : 0);
  }

  async ask() {
    const words = this.fields.words();
    const question = JSON.stringify(words);
    if (question === this.question) return;
    this.question = question;
    this.waiting?.abort();
    this.longer?.abort();
    clearTimeout(this.later);
    this.waiting = new AbortController();
    remember();
    const slow = setTimeout(() => this.result.setAttribute("aria-busy", "true"), PATIENCE);
    let found;
    try {
      found = await (await fetch(`plan?${new URLSearchParams(words)}`, { signal: this.waiting.signal })).json();
    } catch (error) {
      if (error.name === "AbortError") return;
      found = { problems: { "": "The planner does not answer: has “ithaca plan --web” ended? Start it again, and open the address it prints." } };
      this.question = null;
    } finally {
      clearTimeout(slow);
    }
    if (question !== this.question && this.question !== null) return;
    this.result.removeAttribute("aria-busy");
    this.fields.complain(found.problems || {});
    if (found.problems) return this.refuse(found.problems);
    this.pieces = noPieces();
    this.said.hidden = true;
    if (found.answer) {
      this.show(found.answer);
      this.later = setTimeout(() => this.more(words), PAUSE);
    } else {
      this.counting();
      this.later = setTimeout(() => this.more(words), PAUSE);
    }
  }

  refuse(problems) {
    const text = Object.values(problems).join("; ");
    this.result.classList.add("old");
    this.verdict.replaceChildren(h("div", { class: "verdict bad" }, h("p", { class: "word" }, h("span", { "aria-hidden": "true" }, "!"), "No plan"), h("p", {}, text)));
    together();
  }

  counting() {
    this.result.classList.add("old");
    this.began = Date.now();
    this.verdict.replaceChildren(
      h("div", { class: "verdict open" }, h("p", { class: "word" }, h("span", { "aria-hidden": "true" }, "…"), "Counting"), h("p", {}, "There is no arithmetic for this model, so its own code runs on fake tensors: seconds to a minute for each stack that is tried.")),
    );
  }

  // What takes longer, piece by piece.
  async more(words, longest = false) {
    this.longer?.abort();
    const mine = (this.longer = new AbortController());
    const query = new URLSearchParams({ ...words, place: page + this.place, ...(longest ? { longest: "yes" } : {}) });
    try {
      const reader = (await fetch(`more?${query}`, { signal: mine.signal })).body.pipeThrough(new TextDecoderStream()).getReader();
      let rest = "", drawn = Date.now();
      for (;;) {
        const { done, value } = await reader.read();
        if (mine.signal.aborted) return;
        const lines = (rest + (value || "")).split("\n");
        rest = lines.pop();
        const found = lines.filter(Boolean).map((line) => JSON.parse(line));
        for (const piece of found) {
          if (piece.part === "said") this.say(piece.value);
          else if (piece.part === "trouble") this.trouble(piece.value);
          else if (piece.part === "answer") this.show(piece.value);
          else keep(this.pieces, piece);
        }
        if (this.began && !found.length) this.say(null);
        // cells of the grid come by the dozen
        if (done || found.some((piece) => piece.part !== "cell") || Date.now() - drawn > 200) {
          drawn = Date.now();
          this.draw();
        }
        if (done) return;
      }
    } catch (error) {
      if (error.name !== "AbortError") this.trouble("The planner does not answer any more.");
    }
  }

  say(line) {
    this.line = line || this.line || "";
    this.said.hidden = false;
    this.said.textContent = `${this.began ? `${Math.round((Date.now() - this.began) / 1000)} s` : ""} ${this.line}`.trim();
  }

  trouble(text) {
    if (this.began || !this.answer) this.refuse({ "": text });
    this.began = null;
    this.said.hidden = true;
  }

  show(answer) {
    this.answer = answer;
    this.began = this.line = null;
    this.said.hidden = true;
    this.result.classList.remove("old");
    this.draw(true);
  }

  draw(all = false) {
    const { answer, pieces } = this;
    if (!answer) return;
    const apply = this.fields && ((change) => this.fields.set(change));
    const folds = [...this.result.querySelectorAll("details")].map((each) => each.open);
    const cell = this.result.contains(document.activeElement) ? document.activeElement.closest(".cell") : null;
    if (all) {
      this.title.textContent = answer.title;
      this.facts.replaceChildren(data.live ? "" : h("dl", { class: "facts" }, answer.facts.map((fact) => h("div", {}, h("dt", {}, fact.label), h("dd", {}, show[fact.kind](fact.value))))));
      this.verdict.replaceChildren(drawVerdict(answer));
      this.top.replaceChildren(figures(answer.figures));
      this.charts.replaceChildren(...own(this.place, [phases(answer.phases), times(answer.times)]));
      this.rest.replaceChildren(...drawRest(answer).filter(Boolean));
    }
    const counted = Boolean(answer.counted);
    const find = data.live ? (counted ? () => this.find() : "waiting") : null;
    this.asked.replaceChildren(...own(this.place, [drawAdvice(answer, pieces, apply)]));
    this.side.replaceChildren(...own(this.place, [drawCost(answer), drawLongest(pieces, apply, find)]));
    this.map.replaceChildren(...own(this.place, [drawGrid(pieces, apply)]));
    this.rungs.replaceChildren(...own(this.place, [drawLadder(pieces)]));
    const names = new Set();
    for (const bar of [...(answer.phases?.bars || []), ...(pieces.ladder?.rungs || [])]) Object.keys(bar.parts).forEach((name) => names.add(name));
    const wanted = orderedCategories(names);
    if (this.keys.dataset.names !== wanted.join()) {
      this.keys.dataset.names = wanted.join();
      this.keys.replaceChildren(wanted.length ? legend(wanted) : "");
    }
    const now = [...this.result.querySelectorAll("details")];
    if (now.length === folds.length) now.forEach((each, at) => (each.open = folds[at]));
    if (cell) this.map.querySelector(`[data-row="${cell.dataset.row}"][data-column="${cell.dataset.column}"]`)?.focus({ preventScroll: true });
    together();
  }

  find() {
    this.began = Date.now();
    this.say("dry runs at several contexts");
    this.more(this.fields.words(), true);
  }

  close() {
    clearTimeout(this.timer);
    clearTimeout(this.later);
    this.waiting?.abort();
    this.longer?.abort();
    this.section.remove();
  }
}

// Parts of one set-up: no two elements of the page have one name.
function own(place, parts) {
  parts = parts.flat().filter(Boolean);
  for (const part of parts) if (part.id) part.id = `${place}-${part.id}`;
  return parts;
}

const setups = [];
const compared = h("div", {});
const place = h("div", { class: "setups" });

// What depends on all set-ups: the comparison, the title.
function together() {
  const answers = setups.map((setup) => setup.answer).filter(Boolean);
  compared.replaceChildren(setups.length === 2 && answers.length === 2 ? drawComparison(...answers) : "");
  if (answers.length) document.title = `${answers.map((answer) => `${answer.fits ? "✓" : "✕"} ${answer.title}`).join(" · ")} · ithaca`;
}

function names() {
  document.body.classList.toggle("two", setups.length === 2);
  setups.forEach((setup, at) => setup.name(setups.length === 2 ? `Set-up ${"AB"[at]}` : "Set-up"));
}

// The link has all words, so that it asks for the same again.
function query() {
  const words = new URLSearchParams();
  setups.forEach((setup, at) => {
    for (const [name, word] of Object.entries(setup.fields.words())) words.set(at ? `b.${name}` : name, word);
  });
  return words;
}

function remember() {
  const words = query();
  try {
    history.replaceState(null, "", `?${words}`);
  } catch {
    /* browsers limit how often; the next word brings it */
  }
  const file = document.getElementById("file");
  if (file) file.href = `file?${words}`;
}

function add(words) {
  const setup = new Setup("ab"[setups.length], words);
  setups.push(setup);
  place.append(setup.section);
  names();
  return setup;
}

function tools() {
  const compare = h("button", { type: "button", class: "tool", id: "compare" }, "Compare");
  compare.addEventListener("click", () => {
    if (setups.length === 2) setups.pop().close();
    else add(setups[0].fields.words()).ask();
    compare.textContent = setups.length === 2 ? "Remove B" : "Compare";
    names();
    remember();
    together();
    if (setups.length === 2) setups[1].fields.inputs.model.focus();
  });
  const link = h("button", { type: "button", class: "tool" }, "Copy link");
  link.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(location.href);
      link.textContent = "Copied";
    } catch {
      link.textContent = "Not allowed";
    }
    setTimeout(() => (link.textContent = "Copy link"), 1500);
  });
  document.getElementById("tools").append(compare, link, h("a", { class: "tool", id: "file", href: "file", download: "plan.html" }, "One file"));
  return compare;
}

themes();
main.append(compared, place);
document.getElementById("footer").textContent = `ithaca ${data.version} · predicted, not measured · 1 GB = 10⁹ bytes, 1M tokens = 1,048,576`;
if (data.live) {
  const compare = tools();
  const given = Object.fromEntries(new URLSearchParams(location.search));
  const words = (start) => Object.fromEntries(NAMES.filter((name) => given[start + name]).map((name) => [name, given[start + name]]));
  add(words("").model ? words("") : data.first);
  if (words("b.").model) add(words("b."));
  compare.textContent = setups.length === 2 ? "Remove B" : "Compare";
  setups.forEach((setup) => setup.ask());
} else {
  for (const { answer, pieces } of data.setups) {
    const setup = add(answer.words);
    pieces.forEach((piece) => keep(setup.pieces, piece));
    setup.show(answer);
  }
}
document.body.dataset.ready = "yes";
