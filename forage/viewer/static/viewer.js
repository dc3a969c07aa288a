// The viewer's pages in the browser: charts of metrics, live updates, token colours, keys.
// Everything from records is inserted as text, never as markup; the server escapes pages.
(() => {
  "use strict";
  const SECONDS_BETWEEN_UPDATES = 5;
  const colours = ["#2f8f63", "#3f7fd0", "#d07a1e", "#a5549b", "#8a8f2c", "#c0453a", "#2c9aa6", "#7a6cc4"];
  const all = (selector, inside = document) => [...inside.querySelectorAll(selector)];

  // ---- curves -----------------------------------------------------------------------------
  const section = document.getElementById("curves");
  const controls = document.getElementById("chart-controls");
  let isLoading = false, isStale = false;

  function chosenRuns() {
    if (section.dataset.runs !== "chosen") return JSON.parse(section.dataset.runs);
    return all(".choose-run:checked").map((box) => box.value);
  }

  const hasGroups = () => Boolean(controls.groups && controls.groups.value);

  // A run keeps its colour when the table is sorted. The runs of a group share one.
  function runColour(run) {
    const box = all(".choose-run").find((box) => box.value === run);
    const number = box ? (hasGroups() ? box.dataset.group : box.dataset.number) : 0;
    return colours[number % colours.length];
  }

  // Reads the reply: the choice may have changed since the request.
  function drawLegend(charts) {
    const lines = charts.flatMap((chart) => chart ? chart.lines : []);
    const groups = new Map(lines.filter((line) => line.members).map((line) => [line.name, line]));
    document.getElementById("groups-note").hidden = groups.size === 0;
    document.getElementById("groups").replaceChildren(...[...groups.values()].map((line) => {
      const item = document.createElement("li"), swatch = document.createElement("span");
      swatch.className = "swatch";
      swatch.style.background = runColour(line.members[0]);
      item.append(swatch, line.name + ": " + forageCharts.runsText(line));
      return item;
    }));
  }

  function setAddress(name, value) {
    const url = new URL(location.href);
    if (value) url.searchParams.set(name, value);
    else url.searchParams.delete(name);
    history.replaceState(null, "", url);
  }

  function shownCharts() {
    return all("figure.metric", section).filter(
      (figure) => !figure.hidden && figure.closest("details").open);
  }

  function drawMetric(figure, chart) {
    figure.classList.toggle("empty", !chart);
    if (!chart) return forageCharts.remove(figure);
    if (section.dataset.runs === "chosen") chart.lines.forEach((line) => { line.colour = runColour(line.members ? line.members[0] : line.name); });
    forageCharts.draw(figure, chart);
    const names = chart.lines.map((line) => line.name).join(", ");
    figure.querySelector(".plot").setAttribute("aria-label", figure.dataset.metric + " of " + names);
  }

  // One request at a time: while a slider moves, the next request waits for the last answer.
  async function refreshCurves() {
    isStale = isLoading;
    if (isLoading) return;
    isLoading = true;
    try {
      const figures = shownCharts(), runs = chosenRuns();
      const query = new URLSearchParams({ smoothing: controls.smoothing.value, log: controls.log.checked, groups: hasGroups() });
      runs.forEach((run) => query.append("run", run));
      new Set(figures.map((figure) => figure.dataset.metric)).forEach((name) => query.append("metric", name));
      const reply = figures.length && runs.length ? await fetch("/curves.json?" + query) : null;
      if (reply === null || reply.ok) {
        const charts = reply === null ? {} : await reply.json();
        figures.forEach((figure) => drawMetric(figure, charts[figure.dataset.metric]));
        drawLegend(Object.values(charts));
      }
    } finally {
      isLoading = false;
    }
    if (isStale) await refreshCurves();
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
    controls.smoothing.addEventListener("input", refreshCurves);
    controls.log.addEventListener("change", refreshCurves);
    if (controls.groups) {
      controls.groups.value = new URLSearchParams(location.search).get("groups") === "true" ? "true" : "";
      controls.groups.addEventListener("change", () => {
        setAddress("groups", controls.groups.value);
        const ticked = new Set(all(".choose-run:checked").map((box) => box.dataset.group));
        if (hasGroups()) all(".choose-run:enabled").forEach((box) => { box.checked ||= ticked.has(box.dataset.group); });
        colourRuns();
        refreshCurves();
      });
    }
    document.addEventListener("click", async (event) => {
      const link = event.target.closest("a.sort");
      if (!link || event.ctrlKey || event.metaKey || event.shiftKey) return;
      event.preventDefault(); // the ticks stay
      setAddress("sort", link.dataset.sort);
      document.querySelector("input[name=sort]").value = link.dataset.sort;
      link.blur();
      await refreshParts();
      const column = link.dataset.sort.replace(/^-/, "");
      const next = all("a.sort").find((other) => other.dataset.sort.replace(/^-/, "") === column);
      if (next) next.focus();
    });
    all("details.metric-section", section).forEach(
      (part) => part.addEventListener("toggle", refreshCurves));
    document.addEventListener("change", (event) => {
      if (!event.target.classList.contains("choose-run")) return;
      colourRuns();
      refreshCurves();
    });
    colourRuns();
    refreshCurves();
  }

  // ---- live updates -------------------------------------------------------------------------
  const written = new Map(all("[data-live]").map((part) => [part.id, part.innerHTML]));

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
      const text = other.innerHTML; // as the server sent it, before charts are drawn into it
      if (text === written.get(part.id)) continue;
      written.set(part.id, text);
      part.replaceChildren(...other.childNodes);
    }
    forageCharts.drawAll();
    if (section) colourRuns();
  }

  async function update() {
    if (document.visibilityState === "visible") {
      try {
        await refreshParts();
        if (section && controls) await refreshCurves();
      } catch (error) {
        document.body.dataset.lost = "true"; // the viewer has stopped; the page stays as it is
      }
    }
    setTimeout(update, SECONDS_BETWEEN_UPDATES * 1000);
  }
  if (section || document.querySelector("[data-live]")) setTimeout(update, SECONDS_BETWEEN_UPDATES * 1000);

  // ---- token colours ------------------------------------------------------------------------
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
    let low = Infinity, high = -Infinity; // Math.min cannot take this many arguments
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
      : "from " + forageCharts.valueText(low) + " to " + forageCharts.valueText(high);
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
