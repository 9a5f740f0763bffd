"use strict";
// The page is complete without this script, which adds sorting, filters, tips and the theme.
const all = (selector, place = document) => [...place.querySelectorAll(selector)];

// ---- theme: the system's until a reader chooses

function stored(value) {
  try {
    if (value === undefined) return localStorage.getItem("featcal-theme");
    if (value) localStorage.setItem("featcal-theme", value);
    else localStorage.removeItem("featcal-theme");
  } catch { /* a page from a file may have no storage */ }
  return null;
}

function showTheme(theme) {
  const button = document.getElementById("theme");
  if (theme) document.documentElement.dataset.theme = theme;
  else delete document.documentElement.dataset.theme;
  button.textContent = "Theme: " + (theme || "system");
  button.hidden = false;
}

document.getElementById("theme").addEventListener("click", () => {
  const themes = ["", "light", "dark"];
  const now = document.documentElement.dataset.theme || "";
  const next = themes[(themes.indexOf(now) + 1) % 3];
  stored(next);
  showTheme(next);
});
showTheme(stored() || "");

// ---- tables

function keyOf(row, column) {
  const cell = row.cells[column];
  const text = cell.textContent.trim();
  const number = parseFloat(cell.dataset.value ?? text);
  return text === "-" || text === "" ? null : Number.isNaN(number) ? text.toLowerCase() : number;
}

// Numbers within texts, as in "n = 64", are compared as numbers.
function compareTexts(one, two) {
  const number = /(\d+(?:\.\d+)?(?:e[+-]?\d+)?)/;
  const [a, b] = [one.split(number), two.split(number)];
  const place = a.findIndex((part, at) => part !== b[at]);
  if (place < 0) return a.length - b.length;
  if (place >= b.length) return 1;
  const difference = parseFloat(a[place]) - parseFloat(b[place]);
  return place % 2 && difference ? difference : a[place] < b[place] ? -1 : 1;
}

function compare(one, two) {
  if (typeof one !== typeof two) return typeof one === "number" ? -1 : 1;
  if (typeof one === "string") return compareTexts(one, two);
  return one < two ? -1 : one > two ? 1 : 0;
}

function sortBy(table, column) {
  const head = table.tHead.rows[0].cells[column];
  // Numbers begin with the largest, names with the first.
  const body = table.tBodies[0];
  const rows = [...body.rows];
  const numeric = rows.some(row => typeof keyOf(row, column) === "number");
  const before = head.getAttribute("aria-sort");
  const first = numeric ? "descending" : "ascending";
  const second = numeric ? "ascending" : "descending";
  const order = before === first ? second : first;
  const sign = order === "ascending" ? 1 : -1;
  rows.sort((a, b) => {
    const [x, y] = [keyOf(a, column), keyOf(b, column)];
    if (x === null || y === null) return (x === null) - (y === null); // what is absent comes last
    return sign * compare(x, y);
  });
  body.append(...rows);
  for (const cell of table.tHead.rows[0].cells) cell.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", order);
}

function addTools(place) {
  const table = place.querySelector("table");
  const tools = place.querySelector(".tools");
  const search = tools.querySelector("input[type=search]");
  const only = tools.querySelector(".only");
  const output = tools.querySelector("output");
  const rows = [...table.tBodies[0].rows];
  tools.hidden = false;
  for (const [column, head] of [...table.tHead.rows[0].cells].entries()) {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = head.textContent;
    button.addEventListener("click", () => sortBy(table, column));
    head.replaceChildren(button);
  }
  function filter() {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const row of rows) {
      const text = row.textContent.toLowerCase();
      const wanted = words.every(word => text.includes(word));
      row.hidden = !wanted || Boolean(only?.checked && !row.querySelector(".changed"));
    }
    const shown = rows.filter(row => !row.hidden).length;
    output.textContent = shown === rows.length ? "" : `${shown} of ${rows.length} rows`;
  }
  search.addEventListener("input", filter);
  only?.addEventListener("change", filter);
  for (const box of all("[data-column]", tools)) {
    box.addEventListener("change", () => {
      for (const row of table.rows) row.cells[box.dataset.column].hidden = !box.checked;
    });
  }
}

all(".table[data-tools]").forEach(addTools);

// ---- figures

const tip = document.getElementById("tip");

function showTip(point) {
  all(".here").forEach(mark => mark.classList.remove("here"));
  tip.hidden = !point;
  if (!point) return;
  point.classList.add("here");
  tip.textContent = point.dataset.tip;
  const at = point.getBoundingClientRect();
  const [width, height] = [tip.offsetWidth, tip.offsetHeight];
  const left = at.left + at.width / 2 - width / 2;
  tip.style.left = Math.max(4, Math.min(left, innerWidth - width - 4)) + "px";
  tip.style.top = (at.top - height - 8 > 0 ? at.top - height - 8 : at.bottom + 8) + "px";
}

function nearest(points, event) {
  let [best, least] = [null, 30];
  for (const point of points) {
    const at = point.getBoundingClientRect();
    const x = at.left + at.width / 2 - event.clientX;
    const y = at.top + at.height / 2 - event.clientY;
    if (Math.hypot(x, y) < least) [best, least] = [point, Math.hypot(x, y)];
  }
  return best;
}

function addTips(plot) {
  const points = () => all(".series:not(.away) .pt", plot);
  plot.addEventListener("pointermove", event => showTip(nearest(points(), event)));
  plot.addEventListener("pointerdown", event => showTip(nearest(points(), event)));
  plot.addEventListener("pointerleave", () => showTip(null));
  plot.addEventListener("blur", () => showTip(null));
  plot.addEventListener("keydown", event => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (event.key === "Escape") showTip(null);
    if (!step) return;
    event.preventDefault();
    const marks = points();
    const now = marks.findIndex(mark => mark.classList.contains("here"));
    const next = now < 0 ? (step > 0 ? 0 : marks.length - 1) : now + step;
    showTip(marks[(next + marks.length) % marks.length]);
  });
}

function addLegend(figure) {
  for (const button of all(".legend button", figure)) {
    const parts = all(".series", figure).filter(part => part.dataset.series === button.dataset.name);
    const others = all(".series", figure).filter(part => !parts.includes(part));
    button.addEventListener("click", () => {
      const shown = button.getAttribute("aria-pressed") === "false";
      button.setAttribute("aria-pressed", String(shown));
      parts.forEach(part => part.classList.toggle("away", !shown));
    });
    button.addEventListener("pointerenter", () => others.forEach(part => part.classList.add("faint")));
    button.addEventListener("pointerleave", () => others.forEach(part => part.classList.remove("faint")));
  }
}

all(".plot").forEach(addTips);
all("figure").forEach(addLegend);

// ---- print: everything that is folded is opened

addEventListener("beforeprint", () => all("section > details").forEach(part => { part.open = true; }));
