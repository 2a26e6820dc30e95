// Draws the figures in the colours of the reader's scheme and recolours the text by layer.
"use strict";
const report = JSON.parse(document.getElementById("report-data").textContent);
const dark = window.matchMedia("(prefers-color-scheme: dark)");
const mouse = window.matchMedia("(hover: hover)");

// One ramp per meaning: depth of a layer, nearness to a tie (as in the text), load of an expert.
// Lightness is monotone along each, so they read the same with every kind of colour vision. Each
// scheme takes the part of the ramp that stands out from its ground.
const DEPTH = ["#440154", "#472d7b", "#3b528b", "#2c728e", "#21918c", "#28ae80", "#5ec962",
  "#addc30", "#fde725"];
const PART = { light: [0, 0.8], dark: [0.35, 1] };
const GAP = {
  light: ["#a63603", "#d9620f", "#f08a3c", "#fbb97f", "#fde3cb", "#fdf6ef"],
  dark: ["#ffa652", "#dd7d2b", "#a85c20", "#70401c", "#42291a", "#23201f"],
};
const LOAD = {
  light: ["#2166ac", "#67a9cf", "#f3f1ec", "#ef8a62", "#b2182b"],
  dark: ["#7cc4ff", "#2f6fab", "#2a2e35", "#b0453c", "#ff9086"],
};

function scheme() { return dark.matches ? "dark" : "light"; }

function mixed(first, second, share) {
  const parts = [1, 3, 5].map((at) => {
    const a = parseInt(first.slice(at, at + 2), 16), b = parseInt(second.slice(at, at + 2), 16);
    return Math.round(a + (b - a) * share).toString(16).padStart(2, "0");
  });
  return "#" + parts.join("");
}

function along(stops, place) {
  const at = Math.min(Math.max(place, 0), 1) * (stops.length - 1);
  const low = Math.min(Math.floor(at), stops.length - 2);
  return mixed(stops[low], stops[low + 1], at - low);
}

function ramp(place) {
  const [low, high] = PART[scheme()];
  return along(DEPTH, low + (high - low) * place);
}

function scale(name) {
  const stops = name === "ramp" ? [...Array(11).keys()].map((i) => ramp(i / 10))
    : (name === "load" ? LOAD : GAP)[scheme()];
  return stops.map((colour, i) => [i / (stops.length - 1), colour]);
}

function colour(role) {
  const [name, argument] = role.slice(1).split(":");
  if (name === "ramp") return ramp(Number(argument));
  if (name === "scale") return scale(argument);
  return getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
}

function coloured(value, key) {
  if (Array.isArray(value)) return value.map((item) => coloured(item, key));
  if (value !== null && typeof value === "object") {
    return Object.fromEntries(Object.entries(value).map(([k, item]) => [k, coloured(item, k)]));
  }
  const isColour = /colou?r(scale)?$/.test(key) && typeof value === "string";
  return isColour && value.startsWith("@") ? colour(value) : value;
}

function axes(layout) {
  const line = { gridcolor: colour("@grid"), linecolor: colour("@line"), zerolinecolor: colour("@line") };
  for (const name of ["xaxis", "yaxis"]) layout[name] = { ...line, ...layout[name] };
  return layout;
}

function dressed(figure, width) {
  const { data, layout } = coloured(figure, "");
  const narrow = width < 520;
  const long = data.some((trace) => (trace.x || []).some((label) => String(label).length > 3));
  if (narrow && long && layout.xaxis.type === "category") layout.xaxis.tickangle = -60;
  for (const trace of data) {
    const bar = trace.colorbar || (trace.marker && trace.marker.colorbar);
    if (bar && narrow) {
      const margin = { t: 12, r: 8, b: 130, l: 48 };
      const below = -72 / (layout.height - margin.t - margin.b);
      Object.assign(bar, { orientation: "h", y: below, yanchor: "top", x: 0.5, len: 1 });
      bar.title.side = "bottom";
      layout.margin = margin;
    }
    if (trace.type === "heatmap" && narrow) trace.texttemplate = null;
  }
  return {
    data,
    layout: axes({
      margin: { t: 12, r: 16, b: 48, l: 60 },
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: colour("@ink") },
      hoverlabel: { bgcolor: colour("@card"), bordercolor: colour("@line"), font: { color: colour("@ink") } },
      hovermode: "closest",
      dragmode: mouse.matches ? "zoom" : false,
      ...layout,
    }),
  };
}

const CONFIG = {
  responsive: true,
  displaylogo: false,
  displayModeBar: mouse.matches ? "hover" : false,
  modeBarButtonsToRemove: ["select2d", "lasso2d", "zoomIn2d", "zoomOut2d", "autoScale2d"],
};

async function draw() {
  for (const [key, figure] of Object.entries(report.figures)) {
    const place = document.getElementById(key);
    const { data, layout } = dressed(figure, place.clientWidth);
    await Plotly.react(place, data, layout, CONFIG);
  }
}

// Paper is narrower than most windows, and two charts shall stand on a page; maps of many layers
// keep their height.
const PAPER = { width: 680, height: 330, most: 880 };

function toPaper() {
  for (const part of document.querySelectorAll("details:not([open])")) {
    part.open = part.dataset.closed = true;
  }
  for (const [key, figure] of Object.entries(report.figures)) {
    const place = document.getElementById(key), whole = figure.layout.height;
    const height = whole > 520 ? Math.min(whole, PAPER.most) : PAPER.height;
    place.style.height = `${height}px`;
    Plotly.relayout(place, { width: PAPER.width, height });
  }
}

function toScreen() {
  for (const part of document.querySelectorAll("details[data-closed]")) {
    part.open = false;
    delete part.dataset.closed;
  }
  for (const [key, figure] of Object.entries(report.figures)) {
    const place = document.getElementById(key);
    place.style.height = `${figure.layout.height}px`;
  }
  draw();
}

function level(gap) {
  return gap === null ? report.text.limits.length : report.text.limits.filter((x) => gap >= x).length;
}

function smallest(gaps) {
  const known = gaps.filter((gap) => gap !== null);
  return known.length ? Math.min(...known) : null;
}

function colourText(layer) {
  const tokens = document.getElementById("text").children;
  report.text.gaps.forEach((gaps, i) => {
    const gap = layer < 0 ? smallest(gaps) : gaps[layer];
    tokens[i].className = "g" + level(gap);
    tokens[i].title = gap === null ? "no gap known" : `${gap} of the median gap`;
  });
}

function describe(token) {
  const i = [...token.parentNode.children].indexOf(token);
  const gaps = report.text.gaps[i], nearest = smallest(gaps);
  const where = report.text.layers[gaps.indexOf(nearest)];
  document.getElementById("text-detail").textContent = nearest === null
    ? `Token ${i}: no gap known.`
    : `Token ${i}: smallest gap ${nearest} of the median, in layer ${where}.`;
}

function listen() {
  const text = document.getElementById("text");
  if (text === null) return;
  document.getElementById("text-layer").addEventListener("change", (event) =>
    colourText(Number(event.target.value)));
  for (const kind of ["click", "mouseover"]) {
    text.addEventListener(kind, (event) => {
      if (event.target.parentNode === text) describe(event.target);
    });
  }
}

listen();
let width = window.innerWidth;
dark.addEventListener("change", draw);
window.addEventListener("beforeprint", toPaper);
window.addEventListener("afterprint", toScreen);
window.addEventListener("resize", () => {
  if ((width < 600) !== (window.innerWidth < 600)) draw();
  width = window.innerWidth;
});
draw().then(() => {
  if (troubles.length === 0) document.documentElement.dataset.status = "drawn";
});
