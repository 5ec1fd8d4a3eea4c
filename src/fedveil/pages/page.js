(function () {
  "use strict";
  // A chart is read by its own table, whenever it is looked at: a page that is redrawn needs no more.
  var known = new WeakMap();
  function read(svg) {
    if (!known.has(svg)) known.set(svg, chart(svg));
    return known.get(svg);
  }
  function chart(svg) {
    var figure = svg.closest("figure"), log = svg.dataset.log ? Math.log10 : Number;
    var low = log(+svg.dataset.low), high = log(+svg.dataset.high), start = +svg.dataset.start, end = +svg.dataset.end;
    var rows = Array.from(figure.querySelectorAll("details tbody tr"));
    return {
      figure: figure, rows: rows,
      places: rows.map(function (row) {
        return start + (end - start) * (log(+row.querySelector("data").value) - low) / (high - low);
      })
    };
  }
  function show(svg, k) {
    var found = read(svg), at = Math.max(0, Math.min(found.rows.length - 1, k)), cursor = svg.querySelector(".cursor");
    var heads = found.figure.querySelectorAll("details thead th");
    svg.dataset.at = at;
    cursor.setAttribute("x1", found.places[at]); cursor.setAttribute("x2", found.places[at]);
    cursor.classList.add("on");
    found.figure.querySelector(".readout").textContent = Array.from(found.rows[at].cells, function (cell, i) {
      return heads[i].textContent + " " + cell.textContent;
    }).join(", ");
  }
  function charted(e) { return e.target.closest && e.target.closest("figure svg[data-low]"); }
  document.addEventListener("pointermove", function (e) {
    var svg = charted(e);
    if (!svg) return;
    var box = svg.getBoundingClientRect(), x = (e.clientX - box.left) * svg.viewBox.baseVal.width / box.width, best = 0;
    var places = read(svg).places;
    places.forEach(function (place, k) { if (Math.abs(place - x) < Math.abs(places[best] - x)) best = k; });
    show(svg, best);
  });
  document.addEventListener("keydown", function (e) {
    var svg = charted(e);
    if (!svg) return;
    var at = "at" in svg.dataset ? +svg.dataset.at : -1;
    var moves = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: Infinity };
    if (e.key in moves) { show(svg, moves[e.key]); e.preventDefault(); }
  });
  document.addEventListener("redrawn", function (e) { var svg = charted(e); if (svg) show(svg, +svg.dataset.at); });
})();
