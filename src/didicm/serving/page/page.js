"use strict";
// The page asks POST /predict with all steps and shows them; it keeps nothing and talks to its own server alone.

const TOP = 5;
const DASHES = ["", "7 4", "2 4", "10 3 2 3", "5 2"]; // lines can be told apart without colours
const FRAME = { width: 420, height: 190, left: 40, right: 8, top: 8, bottom: 34 };
const $ = (id) => document.getElementById(id);
const percent = (p) => (100 * p).toFixed(p > 0.9995 || p < 0.0005 ? 0 : 1) + "\u00a0%";

let info = null;
let started = null; // a promise: the model is known, or why not is told
let shown = []; // one entry per model: its name, its answer, and how to show it at a step
let asked = 0; // the number of the latest question: older answers are dropped
let player = null;
let token = "";

function make(tag, attributes = {}, ...children) {
  const svg = ["svg", "line", "polyline", "text", "title"].includes(tag);
  const element = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

async function ask(path, options = {}) {
  const headers = token ? { Authorization: "Bearer " + token } : {};
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch {
    throw new Error("The server cannot be reached.");
  }
  if (response.status === 401) {
    $("access").hidden = false;
    throw new Error(token ? "The token is wrong." : "");
  }
  return response;
}

async function answer(response) {
  let content;
  try {
    content = await response.json();
  } catch { // of a proxy before the server
    throw new Error(`The server cannot be reached: status ${response.status}.`);
  }
  const failed = content.error ?? content.predictions?.find((entry) => entry.error)?.error;
  if (failed) throw new Error(failed[0].toUpperCase() + failed.slice(1) + ".");
  return content;
}

function tell(error) {
  $("error").textContent = error?.message ?? "";
  $("error").hidden = !error?.message;
}

async function start() {
  try {
    info = await answer(await ask("info"));
    const model = info.models[info.model];
    $("model").textContent = info.model;
    document.title = `${info.model} · didicm`;
    const facts = [model.kind, `${model.classes.length} classes`];
    if (model.sampler?.steps) facts.push(`${model.sampler.steps} steps`);
    facts.push(model.calibrated ? "calibrated" : "not calibrated");
    if (info.baseline) facts.push(`beside ${info.baseline}`);
    $("about").textContent = facts.join(" · ");
    const examples = await answer(await ask("examples"));
    $("examples").replaceChildren(...(await Promise.all(examples.map(exampleButton))));
    $("offered").hidden = examples.length === 0;
    tell(null);
  } catch (error) {
    tell(error);
  }
}

async function exampleButton({ name, url }) {
  const blob = await (await ask(url)).blob();
  const picture = make("img", { src: URL.createObjectURL(blob), alt: name });
  const button = make("button", { type: "button", title: name, "aria-pressed": "false" }, picture);
  button.addEventListener("click", () => predict(blob, `example: ${name}`, button));
  return make("li", {}, button);
}

async function predict(file, name, button = null) {
  const number = ++asked;
  stop();
  for (const other of document.querySelectorAll("#examples button")) other.setAttribute("aria-pressed", other === button);
  $("status").textContent = "Asking the model";
  $("panels").classList.add("waiting");
  try {
    if (file.size > info.limits.upload_bytes) {
      throw new Error(`This file is too large: at most ${Math.floor(info.limits.upload_bytes / 2 ** 20)} MB are allowed.`);
    }
    const body = new FormData();
    body.append("image", file, "image"); // the file's own name is nobody's business
    body.append("top", TOP);
    body.append("trajectory", info.models[info.model].trajectory);
    body.append("baseline", info.baseline !== null);
    const content = await answer(await ask("predict", { method: "POST", body }));
    if (number !== asked) return;
    tell(null);
    showImage(file, name);
    showAnswers(content.predictions[0]);
  } catch (error) {
    if (number !== asked) return;
    tell(error);
    $("status").textContent = "";
    $("result").hidden = true;
    $("preview").hidden = true;
    $("undrawn").hidden = true;
  } finally {
    if (number === asked) $("panels").classList.remove("waiting");
  }
}

function showImage(file, name) {
  const preview = $("preview");
  URL.revokeObjectURL(preview.src);
  preview.onload = () => preview.classList.toggle("small", preview.naturalWidth < 100);
  preview.onerror = () => {
    preview.hidden = true;
    $("undrawn").textContent = `${name}: browsers do not draw its format`;
    $("undrawn").hidden = false;
  };
  $("undrawn").hidden = true;
  preview.src = URL.createObjectURL(file);
  preview.alt = name;
  preview.hidden = false;
}

function showAnswers(prediction) {
  const { baseline, ...own } = prediction;
  const looks = new Map(own.classes.map(({ name }, k) => [name, { colour: `c${k}`, dashes: DASHES[k] }]));
  const look = (name) => looks.get(name) ?? { colour: "other", dashes: "1 3" }; // a class looks alike in both models
  shown = [panel(info.model, own, look)];
  if (baseline) shown.push(panel(info.baseline, baseline, look));
  $("panels").replaceChildren(...shown.map((item) => item.element));
  const last = Math.max(...shown.map((item) => item.last));
  $("steps").hidden = last === 0;
  $("step").max = last;
  $("step").value = last;
  $("result").hidden = false;
  showStep();
  const [best] = own.classes;
  $("status").textContent = `Most probable: ${best.name}, ${percent(best.probability)}`;
}

// One model's answer: a table of classes, a plot over the steps, and what the posterior is worth.
function panel(name, answer, look) {
  const steps = answer.trajectory ?? [{ entropy: answer.entropy, probabilities: answer.classes.map((c) => c.probability) }];
  const last = steps.length - 1;
  const rows = answer.classes.map(({ name }) => {
    const fill = make("div");
    const number = make("td", { class: "number" });
    const bar = make("td", { "aria-hidden": "true", class: look(name).colour }, make("div", { class: "bar" }, fill));
    return { fill, number, element: make("tr", {}, make("th", { scope: "row" }, name), bar, number) };
  });
  const caption = make("caption");
  const entropy = make("dd");
  const facts = make("dl", {}, make("dt", {}, "Entropy"), entropy);
  const { coverage, classes } = info.models[name];
  if (answer.unlike_training) {
    facts.append(
      make("dt", {}, "Unlike the training images"),
      make("dd", {}, `Outlier score ${answer.outlier_score.toFixed(2)}: do not rely on these probabilities`),
    );
  }
  if (answer.conformal_set) {
    facts.append(
      make("dt", {}, `Final set, which holds the true class for ${percent(coverage).replace(".0", "")} of images`),
      make("dd", {}, answer.conformal_set.join(", ")),
    );
  }
  const plot = last > 0 ? trajectoryPlot(answer.classes, steps, look) : null;
  const element = make("section", { "aria-label": name }, make("h3", {}, name));
  element.append(make("table", {}, caption, make("tbody", {}, ...rows.map((row) => row.element))));
  if (plot) element.append(plot.element);
  element.append(facts);
  return {
    element,
    last,
    steps,
    names: answer.classes.map((c) => c.name),
    show(i) {
      const state = steps[Math.min(i, last)];
      rows.forEach((row, k) => {
        row.fill.style.width = `${100 * state.probabilities[k]}%`;
        row.number.textContent = percent(state.probabilities[k]);
      });
      caption.textContent = i >= last ? "Final posterior" : `After step ${i} of ${last}`;
      entropy.textContent = `${state.entropy.toFixed(2)} of at most ${Math.log(classes.length).toFixed(2)} nats`;
      plot?.show(Math.min(i, last));
    },
  };
}

function trajectoryPlot(classes, steps, look) {
  const { width, height, left, right, top, bottom } = FRAME;
  const x = (i) => left + ((width - left - right) * i) / (steps.length - 1);
  const y = (p) => top + (height - top - bottom) * (1 - p);
  const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, role: "img" });
  svg.append(make("title", {}, "Probability of each class over the steps; the table has the numbers of each step"));
  for (const p of [0, 0.5, 1]) {
    svg.append(make("line", { class: "axis", x1: left, x2: width - right, y1: y(p), y2: y(p) }));
    svg.append(make("text", { x: left - 6, y: y(p) + 4, "text-anchor": "end" }, `${100 * p}%`));
  }
  svg.append(make("text", { x: left, y: height - 8 }, "step 0: uniform"));
  svg.append(make("text", { x: width - right, y: height - 8, "text-anchor": "end" }, `step ${steps.length - 1}: final`));
  classes.forEach(({ name }, k) => {
    const points = steps.map((state, i) => `${x(i)},${y(state.probabilities[k])}`).join(" ");
    svg.append(make("polyline", { points, class: look(name).colour, "stroke-dasharray": look(name).dashes }));
  });
  const now = make("line", { class: "now", y1: top, y2: height - bottom });
  svg.append(now);
  return {
    element: svg,
    show(i) {
      now.setAttribute("x1", x(i));
      now.setAttribute("x2", x(i));
    },
  };
}

function showStep() {
  const i = Number($("step").value);
  const last = Number($("step").max);
  for (const item of shown) item.show(i);
  $("where").textContent = `${i} of ${last}`;
  const main = shown[0];
  const probabilities = main.steps[Math.min(i, main.last)].probabilities;
  const best = probabilities.indexOf(Math.max(...probabilities));
  $("step").setAttribute("aria-valuetext", `step ${i} of ${last}: ${main.names[best]} ${percent(probabilities[best])}`);
}

function stop() {
  clearInterval(player);
  player = null;
  $("play").textContent = "Play";
}

function play() {
  if (player !== null) return stop();
  const slider = $("step");
  if (slider.value === slider.max) slider.value = 0;
  $("play").textContent = "Pause";
  showStep();
  player = setInterval(() => {
    slider.value = Number(slider.value) + 1;
    showStep();
    if (slider.value === slider.max) stop();
  }, 500);
}

async function take(files) {
  const [file] = files ?? [];
  await started; // an image may come before the page knows its model
  if (info && file) predict(file, `your image ${file.name}`);
}

$("file").addEventListener("change", (event) => { take(event.target.files); event.target.value = ""; });
$("step").addEventListener("input", () => { stop(); showStep(); });
$("play").addEventListener("click", play);
$("access").addEventListener("submit", (event) => {
  event.preventDefault();
  token = $("token").value;
  $("access").hidden = true;
  started = start();
});
document.addEventListener("paste", (event) => take(event.clipboardData.files));
document.addEventListener("dragover", (event) => { event.preventDefault(); $("drop").classList.add("over"); });
document.addEventListener("dragleave", () => $("drop").classList.remove("over"));
document.addEventListener("drop", (event) => {
  event.preventDefault();
  $("drop").classList.remove("over");
  take(event.dataTransfer.files);
});
started = start();
