document.querySelectorAll("figure svg[data-low]").forEach(function (svg) {
  "use strict";
  var figure = svg.closest("figure"), cursor = svg.querySelector(".cursor");
  var rows = Array.from(figure.querySelectorAll("details tbody tr"));
  var heads = Array.from(figure.querySelectorAll("details thead th"), function (h) { return h.textContent; });
  var log = svg.dataset.log ? Math.log10 : Number;
  var low = log(+svg.dataset.low), high = log(+svg.dataset.high), start = +svg.dataset.start, end = +svg.dataset.end;
  var places = rows.map(function (row) {
    return start + (end - start) * (log(+row.querySelector("data").value) - low) / (high - low);
  });
  var at = -1;
  function show(k) {
    at = Math.max(0, Math.min(rows.length - 1, k));
    cursor.setAttribute("x1", places[at]); cursor.setAttribute("x2", places[at]);
    cursor.classList.add("on");
    figure.querySelector(".readout").textContent = Array.from(rows[at].cells, function (cell, i) {
      return heads[i] + " " + cell.textContent;
    }).join(", ");
  }
  svg.addEventListener("pointermove", function (e) {
    var box = svg.getBoundingClientRect(), x = (e.clientX - box.left) * svg.viewBox.baseVal.width / box.width, best = 0;
    places.forEach(function (place, k) { if (Math.abs(place - x) < Math.abs(places[best] - x)) best = k; });
    show(best);
  });
  svg.addEventListener("keydown", function (e) {
    var moves = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: rows.length - 1 };
    if (e.key in moves) { show(moves[e.key]); e.preventDefault(); }
  });
});
