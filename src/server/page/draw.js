// Drawings on canvases, in the palette's colours, sharp on any screen.

// A context whose unit is a CSS pixel; null while the canvas is not shown.
function prepare(canvas, height) {
  const { clientWidth: width } = canvas;
  if (!width) return null;
  const tall = height ?? canvas.clientHeight;
  const scale = devicePixelRatio || 1;
  const [w, h] = [Math.round(width * scale), Math.round(tall * scale)];
  if (canvas.width !== w || canvas.height !== h) [canvas.width, canvas.height] = [w, h];
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, tall);
  return { context, width, height: tall };
}

const color = (canvas, name) => getComputedStyle(canvas).getPropertyValue(name).trim();

// Lines of the last `numPoints` values, the newest at the right, from 0 to the largest of all.
export function drawSpark(canvas, numPoints, lines) {
  const prepared = prepare(canvas);
  if (!prepared) return;
  const { context, width, height } = prepared;
  const largest = Math.max(1, ...lines.flatMap((line) => line.points));
  const x = (index, count) => width - ((count - 1 - index) * width) / (numPoints - 1);
  const y = (value) => height - 2 - ((height - 6) * value) / largest;
  context.strokeStyle = color(canvas, "--line");
  context.lineWidth = 1;
  context.beginPath();
  context.moveTo(0, height - 0.5);
  context.lineTo(width, height - 0.5);
  context.stroke();
  for (const { points, color: name } of lines) {
    if (!points.length) continue;
    context.beginPath();
    points.forEach((value, index) => context.lineTo(x(index, points.length), y(value)));
    context.strokeStyle = context.fillStyle = color(canvas, name);
    context.lineWidth = 1.5;
    context.lineJoin = "round";
    context.stroke();
    context.lineTo(width, height);
    context.lineTo(x(0, points.length), height);
    context.globalAlpha = 0.14;
    context.fill();
    context.globalAlpha = 1;
  }
  context.fillStyle = color(canvas, "--muted");
  context.font = "10px system-ui, sans-serif";
  context.textBaseline = "top";
  const isShort = largest < 10 && !Number.isInteger(largest);
  context.fillText(largest.toFixed(isShort ? 1 : 0), 2, 1);
}

// A cell for each digit of `owned` and `cached`: shares of the cell's blocks, 0 to 9.
export function drawMap(canvas, { owned, cached }) {
  const width = canvas.clientWidth;
  if (!width) return;
  const count = owned.length;
  // Cells as large as fit into a picture no taller than 120 pixels, in full rows if that can be.
  let size = 14;
  while (size > 3 && Math.ceil(count / Math.floor(width / size)) * size > 120) size -= 1;
  let perRow = Math.floor(width / size);
  for (let fewer = perRow; fewer > 0.8 * perRow; fewer -= 1) {
    if (count % fewer === 0) {
      perRow = fewer;
      break;
    }
  }
  const step = Math.min(14, width / perRow);
  const height = Math.ceil(Math.ceil(count / perRow) * step);
  canvas.style.height = `${height}px`;
  const { context } = prepare(canvas, height);
  const side = step - (step > 5 ? 1.5 : 0.5);
  const fill = {
    free: color(canvas, "--free"),
    cached: color(canvas, "--cached"),
    owned: color(canvas, "--owned"),
  };
  const layers = [
    [fill.free, () => 1],
    // A share is never fainter than can be seen.
    [fill.cached, (at) => (cached[at] === "0" ? 0 : 0.3 + (0.7 * cached[at]) / 9)],
    [fill.owned, (at) => (owned[at] === "0" ? 0 : 0.3 + (0.7 * owned[at]) / 9)],
  ];
  for (const [style, alpha] of layers) {
    context.fillStyle = style;
    for (let at = 0; at < count; at += 1) {
      const strength = alpha(at);
      if (!strength) continue;
      context.globalAlpha = strength;
      context.fillRect((at % perRow) * step, Math.floor(at / perRow) * step, side, side);
    }
  }
  context.globalAlpha = 1;
}
