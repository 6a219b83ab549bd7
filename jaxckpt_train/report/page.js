"use strict";
// What the page does by itself: the theme, the charts in its colours, and the tree.
(() => {
  const root = document.documentElement;
  const report = JSON.parse(document.getElementById("report-data").textContent);
  const toggle = document.getElementById("theme");
  const system = matchMedia("(prefers-color-scheme: dark)");
  const drawn = [];
  root.classList.add("with-script");

  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
  const colour = (name) => getComputedStyle(root).getPropertyValue(name).trim();

  function paint(chart) {
    const text = colour("--text"), quiet = colour("--quiet"), grid = colour("--grid"), font = getComputedStyle(document.body).fontFamily;
    for (const model of chart.references()) {
      if (/Axis$/.test(model.type)) {
        model.setv({ major_label_text_color: quiet, axis_label_text_color: quiet, major_label_text_font: font, axis_label_text_font: font });
      } else if (model.type === "Grid") {
        model.setv({ grid_line_color: grid });
      } else if (model.type === "Legend") {
        model.setv({ label_text_color: text, label_text_font: font, inactive_fill_color: colour("--page") });
      }
    }
  }

  function showTheme() {
    toggle.setAttribute("aria-pressed", String(isDark()));
    drawn.forEach(paint);
  }

  function remember(theme) {
    try { localStorage.setItem("jaxckpt-report-theme", theme); } catch { /* a page without storage forgets it */ }
  }

  function recall() {
    try { return localStorage.getItem("jaxckpt-report-theme"); } catch { return null; }
  }

  const before = recall();
  if (before === "dark" || before === "light") root.dataset.theme = before;
  toggle.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    remember(root.dataset.theme);
    showTheme();
  });
  system.addEventListener("change", showTheme);
  showTheme();
  Explorer.start(report.tree);

  async function drawCharts() {
    if (typeof Bokeh === "undefined") return;
    Bokeh.set_log_level("warn");
    const roots = Object.fromEntries(Object.entries(report.places).map(([place, id]) => [id, `chart-${place}`]));
    const views = await Bokeh.embed.embed_items({ report: report.document }, [{ docid: "report", roots, root_ids: Object.keys(roots) }]);
    for (const view of views.flatMap((each) => [...each])) {
      drawn.push(view.model);
      paint(view.model);
    }
  }

  drawCharts().finally(() => { root.dataset.ready = "true"; });
})();
