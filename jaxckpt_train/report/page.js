"use strict";
// The script of the page: the theme, the charts in its colours, and the tree.
(() => {
  const root = document.documentElement;
  const report = JSON.parse(document.getElementById("report-data").textContent);
  const toggle = document.getElementById("theme");
  const system = matchMedia("(prefers-color-scheme: dark)");
  const drawn = [];
  root.classList.add("with-script");

  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
  const colour = (name) => getComputedStyle(root).getPropertyValue(name).trim();

  const SHAPES = {
    circle: "\u25cf", square: "\u25a0", triangle: "\u25b2", inverted_triangle: "\u25bc", diamond: "\u25c6", x: "\u2715",
    square_x: "\u22a0", dash: "\u2501",
  };

  // The legend of a chart. A click on a name hides and shows its series.
  function addLegend(chart, place) {
    const names = document.createElement("div");
    names.className = "legend";
    for (const item of chart.tags) {
      const button = document.createElement("button");
      const mark = document.createElement("span");
      button.type = "button";
      button.setAttribute("aria-pressed", "true");
      mark.textContent = SHAPES[item.mark] ?? SHAPES.square;
      mark.style.color = item.colour;
      mark.setAttribute("aria-hidden", "true");
      button.append(mark, ` ${item.name}`);
      button.addEventListener("click", () => {
        const shown = button.getAttribute("aria-pressed") !== "true";
        button.setAttribute("aria-pressed", String(shown));
        for (const id of item.ids) chart.document.get_model_by_id(id).visible = shown;
      });
      names.append(button);
    }
    if (chart.tags.length > 0) place.before(names);
  }

  // Set as many ticks as there is room for.
  function fit(chart, width) {
    const ticks = Math.max(2, Math.min(8, Math.floor(width / 140)));
    for (const axis of chart.below) {
      const factors = chart.x_range.factors;
      if (factors) axis.major_label_orientation = factors.length * 110 > width ? 0.5 : "horizontal";
      else if (axis.ticker.desired_num_ticks !== ticks) axis.ticker.desired_num_ticks = ticks;
    }
  }

  function paint(chart) {
    const quiet = colour("--quiet"), grid = colour("--grid"), font = getComputedStyle(document.body).fontFamily;
    for (const model of chart.references()) {
      if (/Axis$/.test(model.type)) {
        model.setv({ major_label_text_color: quiet, axis_label_text_color: quiet, major_label_text_font: font, axis_label_text_font: font });
      } else if (model.type === "Grid") {
        model.setv({ grid_line_color: grid });
      }
    }
  }

  function showTheme() {
    toggle.setAttribute("aria-pressed", String(isDark()));
    drawn.forEach(paint);
  }

  function remember(theme) {
    try { localStorage.setItem("jaxckpt-report-theme", theme); } catch { /* without storage, the choice is not remembered */ }
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
      const chart = view.model, place = document.getElementById(roots[chart.id]);
      if (place === null) continue;  // a tooltip is a separate view
      drawn.push(chart);
      paint(chart);
      addLegend(chart, place);
      new ResizeObserver(() => fit(chart, place.clientWidth)).observe(place);
    }
  }

  drawCharts().finally(() => { root.dataset.ready = "true"; });
})();
