(() => {
  "use strict";
  const root = document.documentElement;
  root.classList.add("js");
  const figures = JSON.parse(document.getElementById("figures").textContent);

  // Colours in the figures are names of CSS variables ("--accent"); a probe element resolves light-dark() for us.
  const probe = document.createElement("i");
  probe.hidden = true;
  document.body.append(probe);
  const colour = (name) => {
    probe.style.color = `var(${name})`;
    return getComputedStyle(probe).color;
  };
  const LITERAL = new Set(["x", "y", "z", "text", "customdata", "name", "ticktext", "tickvals"]);
  const resolved = (value) => {
    if (typeof value === "string") return /^--[a-z0-9-]+$/.test(value) ? colour(value) : value;
    if (Array.isArray(value)) return value.map(resolved);
    if (value && typeof value === "object")
      return Object.fromEntries(
        Object.entries(value).map(([key, item]) => [key, LITERAL.has(key) ? item : resolved(item)]),
      );
    return value;
  };

  const coarse = matchMedia("(pointer: coarse)").matches;
  const axis = (own) => ({
    gridcolor: "--line", linecolor: "--line", zeroline: false, automargin: true, tickcolor: "--line",
    fixedrange: coarse, ...own,
  });
  const layoutOf = (own) => {
    const layout = {
      margin: { l: 48, r: 10, t: 6, b: 34 },
      font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: "--muted" },
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      showlegend: false, hovermode: "x unified", dragmode: coarse ? false : "zoom",
      hoverlabel: { bgcolor: "--surface", bordercolor: "--line", font: { color: "--text", size: 12 } },
      ...own,
    };
    for (const key of Object.keys(layout)) if (/^[xy]axis\d*$/.test(key)) layout[key] = axis(layout[key]);
    return resolved(layout);
  };

  const draw = (element) => {
    const figure = figures[element.id];
    const frame = figure.frames && figure.frames[element.dataset.frame ?? figure.frames.length - 1];
    const data = resolved(figure.data);
    if (frame) data[0].z = frame.z;
    return Plotly.react(element, data, layoutOf(figure.layout), { displayModeBar: false, responsive: true });
  };

  // plotly.js stands in the page compressed; until it is unpacked nothing is drawn.
  const unpackPlotly = async () => {
    const packed = atob(document.getElementById("plotly").textContent);
    const bytes = Uint8Array.from(packed, (character) => character.charCodeAt(0));
    const unpacked = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    const script = document.createElement("script");
    script.textContent = await new Response(unpacked).text();
    document.head.append(script);
  };
  const withoutCharts = () => {
    for (const element of document.querySelectorAll(".chart"))
      element.textContent = "The charts need a newer browser (one from 2023 on); the numbers on this page do not.";
  };

  const visible = () => [...document.querySelectorAll(".chart")].filter((element) => element.offsetParent);
  const drawAll = () => window.Plotly && visible().forEach(draw);

  for (const slider of document.querySelectorAll(".slider input")) {
    const chart = document.getElementById(slider.dataset.chart);
    const output = slider.closest(".slider").querySelector("output");
    const show = () => {
      const frame = figures[chart.id].frames[slider.value];
      chart.dataset.frame = slider.value;
      output.textContent = frame.label;
      slider.setAttribute("aria-valuetext", frame.label);
      if (chart.data) Plotly.restyle(chart, { z: [frame.z] }, [0]);
    };
    slider.addEventListener("input", show);
    show();
  }

  const tabs = [...document.querySelectorAll(".tabs button")];
  const select = (chosen) => {
    for (const tab of tabs) {
      const on = tab === chosen;
      tab.setAttribute("aria-selected", on);
      tab.tabIndex = on ? 0 : -1;
      document.getElementById(tab.getAttribute("aria-controls")).hidden = !on;
    }
    drawAll();
  };
  tabs.forEach((tab, index) => {
    tab.addEventListener("click", () => select(tab));
    tab.addEventListener("keydown", (event) => {
      const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!move) return;
      const next = tabs[(index + move + tabs.length) % tabs.length];
      next.focus();
      select(next);
    });
  });

  const systemDark = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.style.colorScheme ? root.style.colorScheme === "dark" : systemDark.matches);
  const toggle = document.getElementById("theme");
  const name = () => (toggle.textContent = isDark() ? "Light" : "Dark");
  toggle.addEventListener("click", () => {
    root.style.colorScheme = isDark() ? "light" : "dark";
    name();
    drawAll();
  });
  systemDark.addEventListener("change", () => {
    name();
    drawAll();
  });
  name();
  if (tabs.length) select(tabs[0]);
  unpackPlotly().then(drawAll, withoutCharts);
})();
