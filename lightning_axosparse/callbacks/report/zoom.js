// Draws the x axes of all charts. The wheel zooms, dragging moves, a double click shows all again.
for (const chart of document.querySelectorAll("svg.zooms")) {
  const { low, high, left, right, bottom } = Object.fromEntries(
    Object.entries(chart.dataset).map(([name, text]) => [name, Number(text)]));
  const scaled = chart.querySelector(".scaled");
  const ticks = chart.querySelector(".ticks");
  const labels = [...chart.querySelectorAll(".labels text")].map((text) => (
    { text, x: Number(text.getAttribute("x")), width: Number(text.dataset.width) }));
  let [from, to] = [low, high];

  const pixel = (value) => left + (value - from) / (to - from) * (right - left);
  const valueAt = (event) => {
    const box = chart.getBoundingClientRect();
    const x = (event.clientX - box.left) / box.width * chart.viewBox.baseVal.width;
    return from + (x - left) / (right - left) * (to - from);
  };

  function drawTicks() {
    const rough = (to - from) / 8;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough);
    const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
    let drawn = "";
    for (let i = Math.ceil(from / step); i * step <= to; i++) {
      const x = pixel(i * step);
      drawn += `<path d="M${x} ${bottom}v5" stroke="#888"/>` +
        `<text x="${x}" y="${bottom + 17}" text-anchor="middle">${(i * step).toFixed(digits)}</text>`;
    }
    ticks.innerHTML = drawn;
  }

  function draw() {
    const factor = (high - low) / (to - from);
    const shift = pixel(low) - left * factor;
    scaled.setAttribute("transform", `translate(${shift} 0) scale(${factor} 1)`);
    for (const { text, x, width } of labels) {
      text.setAttribute("x", x * factor + shift);
      text.style.display = width * factor > 14 ? "" : "none";
    }
    drawTicks();
  }

  function show(start, width) {
    const shown = Math.min(width, high - low);
    from = Math.min(Math.max(start, low), high - shown);
    to = from + shown;
    draw();
  }

  chart.addEventListener("wheel", (event) => {
    event.preventDefault();
    const at = valueAt(event);
    const width = Math.max((high - low) / 1e4, (to - from) * 1.002 ** event.deltaY);
    show(at - (at - from) * width / (to - from), width);
  }, { passive: false });
  chart.addEventListener("pointerdown", (event) => {
    const grabbed = valueAt(event);
    const move = (moved) => show(from + grabbed - valueAt(moved), to - from);
    const release = () => window.removeEventListener("pointermove", move);
    window.addEventListener("pointermove", move);
    window.addEventListener("pointerup", release, { once: true });
  });
  chart.addEventListener("dblclick", () => show(low, high - low));
  draw();
}
