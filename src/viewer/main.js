// Builds the page, repaints after changes, and handles the pointer and the keyboard.

const byId = (id) => document.getElementById(id);

const HOST_LEGEND = [
  ["accent", "schedule"], ["muted", "dispatch"], ["line", "wait"], ["fg", "commit"],
];
const LEGEND = [
  ["waiting", "waiting", "thin"], ["prefill", "prefill chunk"], ["decode", "decode"],
  ["preempted", "preempted", "hatched"], ["paused", "paused", "thin"],
  ["muted", "running, not scheduled in this step", "thin"], ["finished", "finished"],
  ["hit", "tokens found in the prefix cache"], ["evicted", "evicted blocks"],
  ["owned", "blocks owned by requests"], ["cached", "cached blocks"], ["free", "free blocks"],
];

class Viewer {
  constructor(trace) {
    this.trace = trace;
    this.view = new View(trace);
    this.canvas = byId("canvas");
    this.painter = new Painter(this.canvas, this.view);
    this.isDirty = false;
    this.drag = null;
    this.matches = [];
    this.eventAt = -1;
    this.fillHeader();
    this.resize();
    this.view.chooseLaneHeight();
    new ResizeObserver(() => this.resize()).observe(this.canvas);
    this.listen();
    this.paintNow();
  }

  fillHeader() {
    const { trace } = this, { steps } = trace;
    document.title = trace.title + " – pagespec trace";
    byId("title").textContent = trace.title;
    const badge = byId("verdict");
    badge.textContent = trace.violation ? trace.violation.property + " violated"
      : trace.verdict === null ? "not checked" : "accepted";
    badge.title = trace.verdict || "";
    badge.classList.add(trace.violation ? "refused" : trace.verdict === null ? "unchecked" : "accepted");
    const tokens = total(steps.prefill) + total(steps.decode);
    const facts = [
      [trace.numSteps, "steps"], [trace.numLanes, "requests"], [tokens, "tokens computed"],
      [total(steps.hit), "tokens from the prefix cache"], [trace.preemptions.length, "preemptions"],
      [total(steps.evicted), "blocks evicted"],
    ];
    for (const [value, name] of facts) {
      const fact = element("span", "", " " + name);
      fact.prepend(element("b", "", value.toLocaleString("en")));
      byId("summary").append(fact);
    }
    byId("summary").append(element("b", "", milliseconds(trace.end)));
    for (const [colour, name, shape] of LEGEND) addLegend(colour, name, shape);
    if (trace.settings.pipeline_depth) addLegend("decode", "in flight", "faint");
    byId("legend").append(element("span", "", "host:"));
    for (const [colour, name] of HOST_LEGEND) addLegend(colour, name);
    const isMarked = trace.marks.some(([, , , colour]) => colour === "violation");
    if (trace.violation || isMarked) addLegend("violation", "violation, failure", "mark");
  }

  resize() {
    const box = this.canvas.getBoundingClientRect(), ratio = window.devicePixelRatio || 1;
    this.canvas.width = Math.round(box.width * ratio);
    this.canvas.height = Math.round(box.height * ratio);
    this.view.resize(box.width, box.height);
    this.paintNow();
  }

  changed() {
    if (this.isDirty) return;
    this.isDirty = true;
    requestAnimationFrame(() => this.paintNow());
  }

  paintNow() {
    this.isDirty = false;
    this.view.chooseLanes();
    this.painter.range = this.view.stepRange();
    this.painter.paint();
    byId("in-view").classList.toggle("on", this.view.isOnlyInView);
    byId("by-time").classList.toggle("on", this.view.isByTime);
    byId("by-step").classList.toggle("on", !this.view.isByTime);
  }

  choose(step) {
    this.painter.chosen = step;
    if (step >= 0) this.view.showStep(step);
    showPanel(byId("panel"), this.view, step, () => this.choose(-1));
    this.changed();
  }

  changeAxis() { this.view.changeAxis(); this.changed(); }

  goToEvent(by) {
    const { events } = this.trace;
    if (!events.length) return;
    this.eventAt = (this.eventAt + by + events.length) % events.length;
    const [step, name] = events[this.eventAt];
    const lane = this.trace.lanes.name.indexOf(name);
    if (lane >= 0) this.view.showLane(lane);
    this.choose(step);
  }

  find(text) {
    const wanted = text.trim().toLowerCase();
    const names = this.trace.lanes.name.map((name) => name.toLowerCase());
    const exact = names.indexOf(wanted);
    const all = names.map((name, lane) => (name.includes(wanted) ? lane : -1));
    this.matches = !wanted ? [] : all.filter((lane) => lane >= 0);
    if (exact >= 0) this.matches = [exact, ...this.matches.filter((lane) => lane !== exact)];
    this.matchAt = 0;
    this.painter.found = new Set(this.matches);
    byId("found").textContent = wanted ? String(this.matches.length) : "";
    if (this.matches.length) this.view.showLane(this.matches[0]);
    this.changed();
  }

  findNext() {
    if (!this.matches.length) return;
    this.matchAt = (this.matchAt + 1) % this.matches.length;
    this.view.showLane(this.matches[this.matchAt]);
    this.changed();
  }

  changeTheme() {
    const root = document.documentElement;
    const isDark = getComputedStyle(root).colorScheme.includes("dark");
    root.dataset.theme = isDark ? "light" : "dark";
    this.painter.readColours();
    this.changed();
  }

  // The pointer and the keys ---------------------------------------------------------------------

  listen() {
    const { canvas } = this;
    canvas.addEventListener("wheel", (event) => this.onWheel(event), { passive: false });
    canvas.addEventListener("pointerdown", (event) => this.onDown(event));
    canvas.addEventListener("pointermove", (event) => this.onMove(event));
    canvas.addEventListener("pointerup", (event) => this.onUp(event));
    canvas.addEventListener("pointerleave", () => showTip(byId("tip"), null));
    document.addEventListener("keydown", (event) => this.onKey(event));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
      this.painter.readColours();
      this.changed();
    });
    const middle = () => GUTTER + this.view.plotWidth / 2;
    const on = (id, act) => { byId(id).onclick = () => { act(); this.changed(); canvas.focus(); }; };
    on("by-time", () => this.view.isByTime || this.changeAxis());
    on("by-step", () => this.view.isByTime && this.changeAxis());
    on("in", () => this.view.zoom(0.5, middle()));
    on("out", () => this.view.zoom(2, middle()));
    on("fit", () => this.view.fit());
    on("in-view", () => { this.view.isOnlyInView = !this.view.isOnlyInView; });
    on("event", () => this.goToEvent(1));
    on("theme", () => this.changeTheme());
    byId("help").onclick = () => byId("keys").showModal();
    byId("search").addEventListener("input", (event) => this.find(event.target.value));
  }

  onWheel(event) {
    event.preventDefault();
    const { view } = this, [x, y] = [event.offsetX, event.offsetY];
    const isOverLanes = y >= LANES_TOP && y < view.tracksTop;
    if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      view.pan(event.deltaX || event.deltaY);
    } else if (!event.ctrlKey && !event.metaKey && isOverLanes && view.maxScroll) {
      view.scrollTo(view.scroll + event.deltaY);
    } else {
      view.zoom(Math.exp(Math.max(-200, Math.min(200, event.deltaY)) * 0.0025), x);
    }
    this.changed();
  }

  onDown(event) {
    if (event.button) return;
    this.canvas.setPointerCapture(event.pointerId);
    const isOverview = event.offsetY < RULER.y;
    this.drag = { x: event.offsetX, y: event.offsetY, isOverview, isMoved: isOverview };
    if (isOverview) this.jumpTo(event.offsetX);
  }

  jumpTo(x) {
    const { view } = this, span = view.end - view.begin;
    view.moveTo(((x - GUTTER) / view.plotWidth) * view.axisEnd - span / 2, span);
    this.changed();
  }

  onMove(event) {
    const { view, drag } = this, [x, y] = [event.offsetX, event.offsetY];
    if (!drag) {
      showTip(byId("tip"), describe(view, x, y), event.clientX, event.clientY);
      return;
    }
    showTip(byId("tip"), null);
    if (drag.isOverview) {
      this.jumpTo(x);
    } else if (drag.isMoved || Math.hypot(x - drag.x, y - drag.y) > 3) {
      view.pan(drag.x - x);
      view.scrollTo(view.scroll + drag.y - y);
      Object.assign(drag, { x, y, isMoved: true });
      this.changed();
    }
  }

  onUp(event) {
    const { drag, view } = this;
    this.drag = null;
    if (!drag || drag.isMoved || event.offsetX < GUTTER) return;
    this.choose(view.stepAt(view.placeAt(event.offsetX)));
  }

  onKey(event) {
    if (event.target === byId("search")) {
      if (event.key === "Enter") this.findNext();
      if (event.key !== "Escape") return;
      event.target.value = "";
      this.find("");
      this.canvas.focus();
      return;
    }
    if (event.ctrlKey || event.metaKey || event.altKey || byId("keys").open) return;
    const { view } = this, middle = GUTTER + view.plotWidth / 2, chosen = this.painter.chosen;
    const acts = {
      w: () => view.zoom(0.7, middle), s: () => view.zoom(1 / 0.7, middle),
      "+": () => view.zoom(0.7, middle), "-": () => view.zoom(1 / 0.7, middle),
      a: () => view.pan(-view.plotWidth / 6), d: () => view.pan(view.plotWidth / 6),
      ArrowLeft: () => view.pan(-view.plotWidth / 6), ArrowRight: () => view.pan(view.plotWidth / 6),
      ArrowUp: () => view.scrollTo(view.scroll - 60), ArrowDown: () => view.scrollTo(view.scroll + 60),
      ",": () => view.changeLaneHeight(-1), ".": () => view.changeLaneHeight(1),
      "[": () => this.choose(Math.max(0, chosen - 1)),
      "]": () => this.choose(Math.min(this.trace.numSteps - 1, chosen + 1)),
      v: () => { view.isOnlyInView = !view.isOnlyInView; },
      n: () => this.goToEvent(1), p: () => this.goToEvent(-1),
      0: () => view.fit(), f: () => view.fit(), t: () => this.changeAxis(),
      "/": () => byId("search").focus(), "?": () => byId("keys").showModal(),
      Escape: () => this.choose(-1),
    };
    if (!acts[event.key]) return;
    event.preventDefault();
    acts[event.key]();
    this.changed();
  }
}

function addLegend(colour, name, shape) {
  const entry = element("span"), swatch = element("i", shape);
  if (shape !== "hatched") swatch.style.background = `var(--${colour})`;
  entry.append(swatch, name);
  byId("legend").append(entry);
}

unpack(byId("packed").textContent).then((trace) => { window.viewer = new Viewer(trace); });
