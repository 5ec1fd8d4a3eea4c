(function () {
  "use strict";
  var knobs = Array.from(document.querySelectorAll("#knobs input")), answer = document.getElementById("answer");
  var fit = document.getElementById("fit"), trouble = document.getElementById("trouble");
  var asked = 0, waiting = 0, needed = null;

  function values(knob) { return knob.dataset.values.split(" ").map(Number); }
  function query() {
    return knobs.map(function (knob) { return knob.id + "=" + values(knob)[knob.value]; }).join("&");
  }
  function told(knob) {
    var text = knob.dataset.texts.split(" ")[knob.value];
    knob.closest(".knob").querySelector("output").textContent = text;
    knob.setAttribute("aria-valuetext", text);
  }
  function ask(fine, mine) {
    return fetch("./answer?" + query() + (fine ? "&fine=1" : "")).then(function (found) {
      if (!found.ok) return found.text().then(function (text) { throw new Error(text); });
      return found.json();
    }).then(function (found) {
      if (mine !== asked) return false;
      Object.keys(found.parts).forEach(function (id) { document.getElementById(id).innerHTML = found.parts[id]; });
      if (fine) { needed = found.needed; fit.disabled = needed === null; }
      return true;
    });
  }
  function change() {
    var mine = ++asked;
    answer.classList.add("waiting");
    document.getElementById("recipe").setAttribute("href", "./recipe?" + query());
    ask(false, mine).then(function (current) { return current && ask(true, mine); }).then(function (current) {
      if (!current) return;
      answer.classList.remove("waiting");
      trouble.textContent = "";
    }, function (error) { if (mine === asked) trouble.textContent = error.message; });
  }
  knobs.forEach(function (knob) {
    knob.addEventListener("input", function () {
      told(knob);
      clearTimeout(waiting);
      waiting = setTimeout(change, 60);
    });
  });
  fit.addEventListener("click", function () {
    var noise = document.getElementById("noise"), list = values(noise);
    var at = list.findIndex(function (value) { return value >= needed; });
    noise.value = at < 0 ? list.length - 1 : at;
    told(noise);
    change();
  });
  change();
})();
