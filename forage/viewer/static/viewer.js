// The viewer's pages in the browser: charts of metrics, what follows the records, keys, colours.
// Whatever comes from records goes in as text, never as markup; pages are escaped by the server.
(() => {
  "use strict";
  const SECONDS_BETWEEN_LOOKS = 5;
  const colours = ["#2f8f63", "#3f7fd0", "#d07a1e", "#a5549b", "#8a8f2c", "#c0453a", "#2c9aa6", "#7a6cc4"];
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const all = (selector, inside = document) => [...inside.querySelectorAll(selector)];

  // ---- curves -----------------------------------------------------------------------------
  const section = document.getElementById("curves");
  const controls = document.getElementById("chart-controls");
  const plots = new Map(); // figure -> {plot, key}
  let figures = {}; // run -> {step: [...], metric: [...]}

  function chosenRuns() {
    if (section.dataset.runs !== "chosen") return JSON.parse(section.dataset.runs);
    return all(".choose-run:checked").map((box) => box.value);
  }

  function runColour(run) {
    const boxes = all(".choose-run").map((box) => box.value);
    return colours[Math.max(0, boxes.indexOf(run)) % colours.length];
  }

  function smoothed(values, weight) {
    // An exponential mean that starts without a bias towards 0, as TensorBoard's.
    let mean = 0, debias = 0;
    return values.map((value) => {
      if (value === null || value === undefined) return value;
      mean = weight * mean + (1 - weight) * value;
      debias = weight * debias + (1 - weight);
      return mean / debias;
    });
  }

  function shownCharts() {
    return all("figure.metric", section).filter(
      (figure) => !figure.hidden && figure.closest("details").open);
  }

  function tooltip(names) {
    const box = document.createElement("div");
    box.className = "plot-tip";
    box.hidden = true;
    return { hooks: {
      init: (u) => u.over.append(box),
      setCursor: (u) => {
        const index = u.cursor.idx;
        box.hidden = index === null || index === undefined || u.cursor.left < 0;
        if (box.hidden) return;
        const rows = [["step " + u.data[0][index], ""]];
        names.forEach((name, number) => {
          const value = u.data[number * 2 + 2][index];
          if (value !== null && value !== undefined) rows.push([name, number6(value)]);
        });
        box.replaceChildren(...rows.map(([name, value]) => {
          const row = document.createElement("div");
          row.textContent = value === "" ? name : (names.length > 1 ? name + ": " : "") + value;
          return row;
        }));
        const right = u.cursor.left > u.over.clientWidth / 2;
        box.style.left = right ? "" : (u.cursor.left + 12) + "px";
        box.style.right = right ? (u.over.clientWidth - u.cursor.left + 12) + "px" : "";
      },
    } };
  }

  function tickText(value) {
    if (value === null) return "";
    return number6(value).replace(/\.?0*e/, "e"); // 2.000e-4 is wider than the axis: its 2 would be cut
  }

  function number6(value) {
    if (value !== 0 && (Math.abs(value) < 1e-3 || Math.abs(value) >= 1e6)) return value.toExponential(3);
    return String(Number(value.toPrecision(5)));
  }

  // Steps are whole numbers; uPlot alone would write 2.5 and 7.5 below a short run.
  const STEPS_BETWEEN_TICKS = [...Array(10).keys()].flatMap((n) => [1, 2, 5].map((m) => m * 10 ** n));

  // What is 0 throughout, such as a difference that must be 0, would lie on an axis from 0 to 100.
  function valueRange(plot, low, high) {
    if (low === null) return [null, null]; // nothing lies in what was zoomed into
    return low === 0 && high === 0 ? [0, 1] : uPlot.rangeNum(low, high, 0.1, true);
  }

  function draw(figure) {
    const metric = figure.dataset.metric, weight = Number(controls.smooth.value);
    const isLog = controls.log.checked;
    const runs = chosenRuns().filter(
      (run) => figures[run] && (figures[run][metric] || []).some((v) => v !== null));
    const place = figure.querySelector(".plot");
    figure.classList.toggle("empty", runs.length === 0);
    const tables = runs.map((run) => {
      const steps = figures[run].step;
      let values = figures[run][metric];
      if (isLog) values = values.map((v) => v !== null && v > 0 ? v : null);
      return [steps, smoothed(values, weight), values];
    });
    const data = runs.length ? uPlot.join(tables) : [[]];
    const key = JSON.stringify([runs, isLog, weight > 0]);
    const known = plots.get(figure);
    if (known && known.key === key) {
      const steps = known.plot.data[0], shown = known.plot.scales.x;
      const isZoomed = shown.min > steps[0] || shown.max < steps[steps.length - 1];
      known.plot.setData(data, !isZoomed); // what was zoomed into stays
      return isZoomed && known.plot.redraw();
    }
    if (known) known.plot.destroy();
    plots.delete(figure);
    if (!runs.length) return;
    const series = runs.flatMap((run) => {
      const stroke = section.dataset.runs === "chosen" ? runColour(run) : css("--s0");
      return [
        { label: run, stroke, width: 2, spanGaps: true, points: { show: data[0].length < 2 } },
        { label: run + " (each step)", stroke: stroke + "66", width: weight > 0 ? 1 : 0, spanGaps: true,
          points: { show: false } },
      ];
    });
    const axis = { stroke: css("--soft"), grid: { stroke: css("--rule"), width: 1 },
      ticks: { stroke: css("--rule"), width: 1 }, font: "11px system-ui, sans-serif" };
    const plot = new uPlot({
      width: place.clientWidth || 320, height: 190, legend: { show: false },
      cursor: { sync: { key: "steps" }, drag: { x: true, y: false } },
      scales: { x: { time: false }, y: isLog ? { distr: 3 } : { range: valueRange } },
      axes: [{ ...axis, size: 30, incrs: STEPS_BETWEEN_TICKS }, { ...axis, size: 56, values: (u, ticks) => ticks.map(tickText) }],
      series: [{ label: "step" }, ...series],
      plugins: [tooltip(runs)],
    }, data, place);
    place.setAttribute("role", "img");
    place.setAttribute("aria-label", metric + " of " + runs.join(", "));
    plots.set(figure, { plot, key });
  }

  async function refreshCurves() {
    const charts = shownCharts(), runs = chosenRuns();
    if (charts.length && runs.length) {
      const query = new URLSearchParams();
      runs.forEach((run) => query.append("run", run));
      charts.forEach((figure) => query.append("metric", figure.dataset.metric));
      const reply = await fetch("/curves.json?" + query);
      if (!reply.ok) return;
      for (const [run, columns] of Object.entries(await reply.json())) {
        figures[run] = { ...(figures[run] || {}), ...columns };
        // Charts that are closed have older columns: these are fetched when they are opened.
        for (const name of Object.keys(figures[run])) {
          if (figures[run][name].length !== columns.step.length) delete figures[run][name];
        }
      }
    }
    charts.forEach(draw);
    section.dataset.drawn = String(plots.size);
  }

  function filterCharts() {
    const words = controls.metric.value.toLowerCase().split(/\s+/).filter(Boolean);
    all("details.metric-section", section).forEach((part) => {
      let found = 0;
      all("figure.metric", part).forEach((figure) => {
        const text = figure.textContent.toLowerCase();
        figure.hidden = !words.every((word) => text.includes(word));
        found += figure.hidden ? 0 : 1;
      });
      part.hidden = words.length > 0 && !found;
      if (words.length && found) part.open = true;
    });
    refreshCurves();
  }

  function colourRuns() {
    all("#run-table tr").forEach((row) => {
      const box = row.querySelector(".choose-run"), mark = row.querySelector(".run-colour");
      if (box && mark) mark.style.background = box.checked ? runColour(box.value) : "transparent";
    });
  }

  if (section && controls) {
    controls.addEventListener("submit", (event) => event.preventDefault());
    controls.metric.addEventListener("input", filterCharts);
    controls.smooth.addEventListener("input", () => shownCharts().forEach(draw));
    controls.log.addEventListener("change", () => shownCharts().forEach(draw));
    all("details.metric-section", section).forEach(
      (part) => part.addEventListener("toggle", refreshCurves));
    document.addEventListener("change", (event) => {
      if (!event.target.classList.contains("choose-run")) return;
      colourRuns();
      refreshCurves();
    });
    addEventListener("resize", () => plots.forEach(({ plot }, figure) => plot.setSize(
      { width: figure.querySelector(".plot").clientWidth, height: 190 })));
    colourRuns();
    refreshCurves();
  }

  // ---- what follows the records without reloading -------------------------------------------
  async function refreshParts() {
    const parts = all("[data-live]");
    if (!parts.length) return;
    const reply = await fetch(location.href);
    if (!reply.ok) return;
    const fresh = new DOMParser().parseFromString(await reply.text(), "text/html");
    for (const part of parts) {
      const other = fresh.getElementById(part.id);
      if (!other || part.matches(":focus-within")) continue;
      const ticked = new Set(all(".choose-run:checked", part).map((box) => box.value));
      const known = new Set(all(".choose-run", part).map((box) => box.value));
      all(".choose-run", other).forEach((box) => {
        if (known.has(box.value)) box.toggleAttribute("checked", ticked.has(box.value));
      });
      if (other.innerHTML !== part.innerHTML) part.replaceChildren(...other.childNodes);
    }
    if (section) colourRuns();
  }

  async function look() {
    if (document.visibilityState === "visible") {
      try {
        await refreshParts();
        if (section && controls) await refreshCurves();
      } catch (error) {
        document.body.dataset.lost = "true"; // the viewer has ended: what is shown stays
      }
    }
    setTimeout(look, SECONDS_BETWEEN_LOOKS * 1000);
  }
  if (section || document.querySelector("[data-live]")) setTimeout(look, SECONDS_BETWEEN_LOOKS * 1000);

  // ---- tokens by colour ---------------------------------------------------------------------
  const FIELDS = { probability: 1, version: 2, advantage: 3, difference: 4 };

  function tokenFigure(token, name) {
    const text = token.dataset.t.split(" ")[FIELDS[name]];
    const value = text === undefined || text === "-" ? NaN : Number(text);
    return name === "probability" ? Math.exp(value) : value;
  }

  function colourTokens(name) {
    const tokens = all("i[data-t]");
    const figures = name === "" ? [] : tokens.map((token) => tokenFigure(token, name));
    const known = figures.filter(Number.isFinite);
    let low = Infinity, high = -Infinity; // as arguments, so many would be too many for Math.min
    for (const value of known) low = Math.min(low, value), high = Math.max(high, value);
    const reach = Math.max(Math.abs(low), Math.abs(high)) || 1;
    tokens.forEach((token, number) => {
      const value = figures[number];
      let share = 0, hue = "";
      if (name !== "" && Number.isFinite(value)) {
        const isCentred = name === "advantage" || name === "difference";
        share = name === "probability" ? 1 - value : isCentred ? Math.abs(value) / reach
          : high > low ? (value - low) / (high - low) : 0;
        hue = name === "probability" ? "--wrong" : isCentred ? (value < 0 ? "--wrong" : "--right") : "--s1";
      }
      token.style.background = share > 0 && hue
        ? "color-mix(in srgb, var(" + hue + ") " + Math.round(8 + 40 * share) + "%, transparent)" : "";
    });
    document.body.classList.toggle("coloured", name !== "");
    const scale = document.querySelector("#colours .scale");
    scale.textContent = name === "" ? "" : !known.length ? "not recorded for these tokens"
      : "from " + number6(low) + " to " + number6(high);
  }

  const colourForm = document.getElementById("colours");
  if (colourForm) {
    colourForm.addEventListener("submit", (event) => event.preventDefault());
    colourForm.colour.addEventListener("change", () => colourTokens(colourForm.colour.value));
    colourForm.colour.value = "";
  }

  // ---- keys ---------------------------------------------------------------------------------
  const help = document.querySelector("dialog.help");
  const openHelp = () => help.showModal();
  const helpButton = document.querySelector(".help-button");
  if (helpButton) helpButton.addEventListener("click", openHelp);
  const follow = (selector) => {
    const link = document.querySelector(selector);
    if (link) location.assign(link.href);
  };
  const KEYS = {
    j: () => follow("a[rel=next]"), ArrowRight: () => follow("a[rel=next]"),
    k: () => follow("a[rel=prev]"), ArrowLeft: () => follow("a[rel=prev]"),
    u: () => follow("a[rel=up]"), w: () => follow("a.wrong-first"), "?": openHelp,
    "/": () => { const field = document.querySelector("input[type=search]"); if (field) field.focus(); },
    c: () => {
      if (!colourForm) return;
      const field = colourForm.colour;
      field.selectedIndex = (field.selectedIndex + 1) % field.options.length;
      colourTokens(field.value);
    },
  };
  document.addEventListener("keydown", (event) => {
    const isTyping = event.target instanceof Element && event.target.closest("input, select, textarea, [contenteditable]");
    const isScrolling = event.target instanceof Element && event.target.closest(".scroll") && event.key.startsWith("Arrow");
    if (isTyping || isScrolling || event.ctrlKey || event.metaKey || event.altKey || (help && help.open)) return;
    const act = KEYS[event.key];
    if (act) {
      event.preventDefault();
      act();
    }
  });
})();
