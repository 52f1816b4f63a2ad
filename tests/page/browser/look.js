// What a test asks of the page. Put into it before its own script runs.
window.test = (() => {
  const all = (selector) => [...document.querySelectorAll(selector)];
  const byId = (id) => document.getElementById(id);
  const value = (id) => Number(byId(id).dataset.value);
  const rows = (id) => all(`#${id} tbody tr`).map((row) => [...row.cells].map((cell) => cell.textContent));
  const seen = { flights: [], shifts: 0 };  // what someone who watches would see come and go

  new MutationObserver((changes) => {
    for (const { addedNodes } of changes) {
      for (const node of addedNodes) if (node.className === "flight") seen.flights.push(node.textContent);
    }
  }).observe(document, { childList: true, subtree: true });
  new PerformanceObserver((list) => {
    for (const entry of list.getEntries()) if (!entry.hadRecentInput) seen.shifts += entry.value;
  }).observe({ type: "layout-shift", buffered: true });

  const worker = (node) => ({
    name: node.dataset.worker,
    incarnation: node.dataset.incarnation,
    state: node.dataset.state,
    badge: node.querySelector(".badge").textContent,
    map: node.querySelector(".map").getAttribute("aria-label"),
    ...Object.fromEntries(
      [...node.querySelectorAll("[data-field][data-value]")].map((each) => [each.dataset.field, Number(each.dataset.value)]),
    ),
  });

  const look = () => ({
    at: Number(document.body.dataset.at),
    connection: byId("connection").textContent,
    trouble: byId("trouble").hidden ? "" : byId("trouble").textContent,
    workers: all(".worker").map(worker),
    moves: rows("moves"),
    tenants: rows("tenants"),
    sequences: rows("sequences"),
    queued: value("num-queued"),
    queued_tokens: value("queued-tokens"),
    streams: value("num-streams"),
    hits: value("hit-tokens"),
    ttft: value("ttft-count"),
    ...seen,
  });

  // Elements that scroll sideways, or stick out of the window.
  const tooWide = () => [document.documentElement, ...all("body *")]
    .filter((node) => !node.closest(".hidden, thead, svg, .skip, #flights"))
    .filter((node) => {
      const scrolls = node === document.documentElement || ["auto", "scroll"].includes(getComputedStyle(node).overflowX);
      return (scrolls && node.scrollWidth > node.clientWidth + 1) || node.getBoundingClientRect().right > innerWidth + 1;
    })
    .map((node) => `${node.tagName} ${node.id} ${node.className} ${node.scrollWidth} ${node.clientWidth}`);

  const nameOf = (node) => node.id || node.getAttribute("href") || node.getAttribute("aria-labelledby") || node.value;
  // Of the choices of a group, Tab reaches the one that is chosen.
  const focusable = () => all("a[href], button, input, [tabindex='0']").filter((node) => node.type !== "radio" || node.checked).map(nameOf);
  const focused = () => {
    const node = document.activeElement, shown = node.type === "radio" ? node.nextElementSibling : node;
    return [nameOf(node), getComputedStyle(shown).outlineStyle];
  };

  const names = () => ({
    unnamed: all("[role=img], [role=region], table, section, button, input")
      .filter((node) => !(node.getAttribute("aria-label") || node.getAttribute("aria-labelledby") || node.labels?.length))
      .map((node) => node.outerHTML.slice(0, 80)),
    lost: all("[aria-labelledby]").filter((node) => !byId(node.getAttribute("aria-labelledby"))).length,
    cells: all("tbody td").every((cell) => cell.getAttribute("role") === "cell" && cell.dataset.label),
    live: all("[aria-live], [role=status], [role=alert]").map((node) => node.id),
    headings: all("h1, h2, h3").map((node) => Number(node.tagName[1])),
    language: document.documentElement.lang,
  });

  const numbers = (text) => (text.match(/[\d.]+/g) || []).map(Number);
  const channel = (c) => (c / 255 <= 0.03928 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4);
  const luminance = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
  function behind(node) {
    for (let each = node; each; each = each.parentElement) {
      const colour = numbers(getComputedStyle(each).backgroundColor);
      if (colour.length === 3 || colour[3] === 1) return colour;
    }
    return [255, 255, 255];
  }
  // Texts whose contrast with what is behind them is below 4.5.
  const poorContrast = () => all("body *")
    .filter((node) => [...node.childNodes].some((child) => child.nodeType === Node.TEXT_NODE && child.data.trim()))
    .filter((node) => node.getClientRects().length && !node.closest(".hidden, .skip, tr.new, svg, #flights"))
    .map((node) => {
      const both = [luminance(numbers(getComputedStyle(node).color)), luminance(behind(node))].sort((a, b) => b - a);
      return [(both[0] + 0.05) / (both[1] + 0.05), node.className, node.textContent.slice(0, 30)];
    })
    .filter(([ratio]) => ratio < 4.5);

  const forgetShifts = () => { seen.shifts = 0; };

  return { look, forgetShifts, tooWide, focusable, focused, names, poorContrast };
})();
