/* The forward and the reverse process on three classes, drawn in a triangle. Plain JavaScript, nothing is fetched.
 *
 * `simplex` holds the mathematics, as in didicm.diffusion; a test compares the two. What follows it draws.
 */
const simplex = (() => {
  const EPS = 1e-3; // of the log-linear schedule
  const LEAST = 1e-30;
  const sum = (x) => x.reduce((a, b) => a + b, 0);
  const normalise = (x) => x.map((v) => v / sum(x));

  /* The schedule at time t: chance that a label was kept, that it was lost, and the rate of noise. */
  const at = (t) => {
    const keep = EPS + (1 - EPS) * (1 - t);
    return { t, keep, lost: (1 - EPS) * t, rate: (1 - EPS) / keep };
  };

  /* q_t = keep q_0 + (1 - keep) / K */
  const addNoise = (clean, noise) => clean.map((p) => noise.keep * p + noise.lost / clean.length);

  /* What a network says about q_t: the truth, with an error on its logarithms that differs from step to step. */
  const noisyPosterior = (truth, noise, error) =>
    normalise(addNoise(truth, noise).map((q, k) => Math.exp(Math.log(q) + error[k])));

  const cleanPosterior = (q, noise) => {
    const signal = q.map((v) => v - noise.lost / q.length);
    const wrong = sum(signal.map((v) => Math.max(-v, 0))) / q.length;
    return normalise(signal.map((v) => Math.max(v, wrong, LEAST)));
  };

  const eulerStep = (p, q, t, s) => {
    const noise = at(t), r = p.map((v, k) => v / q[k]), scale = (noise.rate * (t - s)) / p.length;
    return normalise(p.map((v, k) => Math.min(1, Math.max(0, v + scale * (q[k] * sum(r) - r[k])))));
  };

  const exactStep = (p, clean, t, s) => {
    const from = at(t), to = at(s);
    if (t === 1) return addNoise(clean, to); // from infinite noise, where the uniform start is true
    const stay = from.keep / to.keep, move = (1 - stay) / p.length;
    const noisy = addNoise(clean, from), r = p.map((v, k) => v / noisy[k]);
    return normalise(addNoise(clean, to).map((v, k) => v * (stay * r[k] + move * sum(r))));
  };

  /* All states from t = 1 to 0; `errors` has the network's error of each step. */
  const reverse = (truth, steps, solver, errors) => {
    let p = truth.map(() => 1 / truth.length);
    const states = [{ t: 1, p }];
    for (let i = 0; i < steps; i++) {
      const t = (steps - i) / steps, s = (steps - i - 1) / steps;
      const asked = at(solver === "exact" ? (t + s) / 2 : t);
      const q = noisyPosterior(truth, asked, errors[i]);
      p = solver === "exact" ? exactStep(p, cleanPosterior(q, asked), t, s) : eulerStep(p, q, t, s);
      states.push({ t: s, p });
    }
    return states;
  };

  return { at, addNoise, reverse };
})();

if (typeof document !== "undefined" && document.getElementById("simplex")) {
  const root = document.getElementById("simplex");
  const CLASSES = ["Coat", "Shirt", "Bag"];
  const CORNERS = [[60, 330], [380, 330], [220, 53]];
  const STEPS = [1, 2, 4, 8, 16];
  const state = { truth: [0.6, 0.32, 0.08], t: 0.35, steps: 3, solver: "exact", error: 0.4, playing: null };
  const get = (name) => root.querySelector(`[data-part="${name}"]`);

  const place = (p) => [0, 1].map((axis) => p.reduce((total, v, k) => total + v * CORNERS[k][axis], 0));
  const point = (p) => place(p).map((v) => v.toFixed(1)).join(",");

  /* Normal numbers that stay the same while a slider moves. */
  const normals = (count) => {
    let seed = 7;
    const uniform = () => ((seed = (seed * 16807) % 2147483647) / 2147483647);
    return Array.from({ length: count }, () => Math.sqrt(-2 * Math.log(uniform())) * Math.cos(6.283185 * uniform()));
  };
  const NOISE = normals(3 * 16);

  const between = (states, t) => {
    const next = Math.max(1, states.findIndex((x) => x.t <= t));
    const [a, b] = [states[next - 1], states[next]], share = (a.t - t) / (a.t - b.t);
    return a.p.map((v, k) => v + share * (b.p[k] - v));
  };

  const draw = () => {
    const steps = STEPS[state.steps];
    const errors = Array.from({ length: steps }, (_, i) =>
      [0, 1, 2].map((k) => state.error * NOISE[3 * i + k]));
    const states = simplex.reverse(state.truth, steps, state.solver, errors);
    const forward = simplex.addNoise(state.truth, simplex.at(state.t)), now = between(states, state.t);
    get("forward").setAttribute("points", [state.truth, [1 / 3, 1 / 3, 1 / 3]].map(point).join(" "));
    get("reverse").setAttribute("points", states.map((x) => point(x.p)).join(" "));
    get("states").innerHTML = states
      .map((x) => `<circle r="3" cx="${place(x.p)[0].toFixed(1)}" cy="${place(x.p)[1].toFixed(1)}"/>`).join("");
    for (const [name, p] of [["truth", state.truth], ["noisy", forward], ["now", now]]) {
      const [x, y] = place(p);
      get(name).setAttribute("transform", `translate(${x.toFixed(1)} ${y.toFixed(1)})`);
    }
    CLASSES.forEach((_, k) => {
      for (const [name, p] of [["noisy", forward], ["now", now]]) {
        get(`${name}-${k}`).style.width = `${100 * p[k]}%`;
        get(`${name}-${k}-text`).textContent = `${(100 * p[k]).toFixed(0)} %`;
      }
    });
    const off = 0.5 * states[steps].p.reduce((total, v, k) => total + Math.abs(v - state.truth[k]), 0);
    get("say").textContent =
      `t = ${state.t.toFixed(2)}: ${(100 * simplex.at(state.t).keep).toFixed(0)} % of the labels are still ` +
      `their own. ${steps} step${steps > 1 ? "s" : ""}, ${steps} network call${steps > 1 ? "s" : ""}: the end is ` +
      `${(100 * off).toFixed(1)} points of probability off the truth.`;
    get("t").value = state.t;
    get("t-text").textContent = state.t.toFixed(2);
    get("steps-text").textContent = steps;
    get("error-text").textContent = state.error.toFixed(1);
  };

  const bars = (name) => CLASSES.map((title, k) =>
    `<div class="bar"><span>${title}</span><div class="track"><div class="${name}" data-part="${name}-${k}"></div></div>` +
    `<span class="value" data-part="${name}-${k}-text"></span></div>`).join("");

  root.innerHTML = `
    <div class="panes">
      <svg viewBox="0 0 440 372" role="img" aria-label="Class probabilities as a point in a triangle">
        <polygon class="outline" points="${CORNERS.map((c) => c.join(",")).join(" ")}"/>
        ${CLASSES.map((name, k) => `<text x="${CORNERS[k][0]}" y="${CORNERS[k][1] + (k === 2 ? -12 : 24)}">${name}</text>`).join("")}
        <polyline class="line forward" data-part="forward"/>
        <polyline class="line reverse" data-part="reverse"/>
        <g class="reverse" data-part="states"></g>
        <g data-part="truth"><path class="truth" d="M-6-6 6 6M6-6-6 6"/></g>
        <g data-part="noisy"><circle class="forward dot" r="8"/></g>
        <g data-part="now"><circle class="reverse dot" r="6"/></g>
      </svg>
      <div class="side">
        <p class="key forward">Forward: the truth, noisy</p>${bars("noisy")}
        <p class="key reverse">Reverse: what the sampler believes</p>${bars("now")}
      </div>
    </div>
    <div class="controls">
      <label>time <input type="range" data-part="t" min="0" max="1" step="0.01"><output data-part="t-text"></output></label>
      <button type="button" data-part="play">Play the reverse process</button>
      <label>steps <input type="range" data-part="steps" min="0" max="4" step="1" value="3"><output data-part="steps-text"></output></label>
      <label>error of the network <input type="range" data-part="error" min="0" max="1" step="0.1" value="0.4"><output data-part="error-text"></output></label>
      <label>solver <select data-part="solver"><option value="exact">exact</option><option value="euler">Euler (the paper)</option></select></label>
    </div>
    <p data-part="say" aria-live="polite"></p>`;

  const stop = () => {
    cancelAnimationFrame(state.playing);
    state.playing = null;
    get("play").textContent = "Play the reverse process";
  };
  const play = () => {
    if (state.playing) return stop();
    state.t = 1;
    get("play").textContent = "Stop";
    let before = null;
    const advance = (time) => {
      state.t = Math.max(0, state.t - (before === null ? 0 : (time - before) / 4000));
      before = time;
      draw();
      if (state.t > 0) state.playing = requestAnimationFrame(advance);
      else stop();
    };
    state.playing = requestAnimationFrame(advance);
  };
  get("t").addEventListener("input", (event) => { stop(); state.t = +event.target.value; draw(); });
  for (const name of ["steps", "error"]) {
    get(name).addEventListener("input", (event) => { state[name] = +event.target.value; draw(); });
  }
  get("solver").addEventListener("input", (event) => { state.solver = event.target.value; draw(); });
  get("play").addEventListener("click", play);

  /* The truth follows the pointer, and on a keyboard the keys 1 to 3, which pull it to a class. */
  const pull = (p) => {
    const held = p.map((v) => Math.min(0.98, Math.max(0.01, v))), total = held.reduce((a, b) => a + b, 0);
    state.truth = held.map((v) => v / total);
    draw();
  };
  const svg = root.querySelector("svg");
  const follow = (event) => {
    const box = svg.getBoundingClientRect(), scale = 440 / box.width;
    const x = (event.clientX - box.left) * scale, y = (event.clientY - box.top) * scale;
    const top = (CORNERS[0][1] - y) / (CORNERS[0][1] - CORNERS[2][1]);
    const right = (x - CORNERS[0][0] - top * (CORNERS[2][0] - CORNERS[0][0])) / (CORNERS[1][0] - CORNERS[0][0]);
    pull([1 - right - top, right, top]);
  };
  svg.addEventListener("pointerdown", (event) => { svg.setPointerCapture(event.pointerId); follow(event); });
  svg.addEventListener("pointermove", (event) => { if (event.buttons) follow(event); });
  root.addEventListener("keydown", (event) => {
    const k = ["1", "2", "3"].indexOf(event.key);
    if (k >= 0) pull(state.truth.map((v, i) => 0.9 * v + (i === k ? 0.1 : 0)));
  });
  draw();
}
