// The live view: the engine's numbers twice a second, as they come from /live/stream.

import { events, request, ServerError } from "./api.js";
import { drawMap, drawSpark } from "./draw.js";

const NUM_POINTS = 240; // two minutes
const RETRY_MS = 2000;

const FORMATS = {
  rate: (value) => value.toFixed(value && value < 10 ? 1 : 0),
  percent: (value) => `${(100 * value).toFixed(1)} %`,
  seconds: (value) => {
    if (value >= 1) return `${value.toFixed(2)} s`;
    return `${(1000 * value).toFixed(value < 0.01 ? 2 : value < 0.1 ? 1 : 0)} ms`;
  },
  duration: (value) => {
    const [h, m, s] = [value / 3600, (value / 60) % 60, value % 60].map(Math.floor);
    return h ? `${h} h ${m} min` : m ? `${m} min ${s} s` : `${s} s`;
  },
};

export class LiveView {
  onFrame = () => {};
  onState = () => {};
  #frame = null;
  #history = { tokens: [], running: [], waiting: [] };

  constructor(root) {
    this.root = root;
    this.shown = [...root.querySelectorAll("[data-live]")];
    new ResizeObserver(() => this.draw()).observe(root);
    // A page in the background needs no numbers; one that is seen again, at once.
    document.addEventListener("visibilitychange", () => {
      if (document.hidden) this.abort?.abort();
      else this.wake?.();
    });
    addEventListener("pagespec-key", () => this.wake?.());
  }

  async run() {
    for (;;) {
      if (!document.hidden) await this.#follow();
      await new Promise((resolve) => {
        this.wake = resolve;
        // Without a key it would ask for one again and again.
        if (!document.hidden && !this.isLocked) setTimeout(resolve, RETRY_MS);
      });
    }
  }

  async #follow() {
    this.abort = new AbortController();
    this.isLocked = false;
    try {
      const response = await request("live/stream", { signal: this.abort.signal });
      for await (const data of events(response)) this.#take(JSON.parse(data));
      this.onState("unreachable");
    } catch (error) {
      if (error.name === "AbortError") return;
      this.isLocked = error instanceof ServerError && error.status === 401;
      this.onState(this.isLocked ? "locked" : "unreachable");
    }
  }

  #take(frame) {
    frame.requests.finished = frame.requests.ended.stop + frame.requests.ended.length;
    this.#frame = frame;
    this.#keep("tokens", frame.tokens.generated_per_s);
    this.#keep("running", frame.requests.running);
    this.#keep("waiting", frame.requests.waiting);
    for (const shown of this.shown) {
      const value = shown.dataset.live.split(".").reduce((at, name) => at?.[name], frame);
      const format = FORMATS[shown.dataset.format] ?? ((number) => number.toLocaleString("en"));
      shown.textContent = value === null || value === undefined ? "–" : format(value);
      shown.dataset.value = value;
    }
    const each = frame.blocks.map.blocks_per_cell;
    document.getElementById("per-cell").textContent = each > 1 ? `, ${each} per cell` : "";
    this.root.dataset.frames = Number(this.root.dataset.frames ?? 0) + 1;
    this.onState(frame.state);
    this.onFrame(frame);
    this.draw();
  }

  #keep(name, value) {
    const points = this.#history[name];
    points.push(value);
    if (points.length > NUM_POINTS) points.shift();
  }

  draw() {
    if (!this.#frame) return;
    const { tokens, running, waiting } = this.#history;
    const find = (id) => document.getElementById(id);
    drawSpark(find("spark-tokens"), NUM_POINTS, [{ points: tokens, color: "--accent" }]);
    drawSpark(find("spark-requests"), NUM_POINTS, [
      { points: waiting, color: "--muted" },
      { points: running, color: "--decode" },
    ]);
    const { map, owned, cached, free } = this.#frame.blocks;
    drawMap(find("map"), map);
    find("map").setAttribute(
      "aria-label",
      `Blocks of the KV cache: ${owned} owned, ${cached} cached, ${free} free`,
    );
  }
}
