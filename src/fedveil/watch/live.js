(function () {
  "use strict";
  var cards = document.getElementById("cards"), connection = document.getElementById("connection");
  var dialog = document.getElementById("stop"), source = new EventSource(cards.dataset.events);

  function say(text, warn) { connection.textContent = text; connection.className = warn ? "warn" : "sub"; }

  // Children of `parent` are the elements of these ids, in this order; what is new is made.
  function arrange(parent, ids, kind, dressed) {
    ids.forEach(function (id, k) {
      var one = document.getElementById(id);
      if (!one) { one = document.createElement(kind); one.id = id; one.className = dressed(id); }
      if (parent.children[k] !== one) parent.insertBefore(one, parent.children[k] || null);
    });
    while (parent.children.length > ids.length) parent.lastElementChild.remove();
  }

  function places(box) { return Array.from(box.querySelectorAll("a, button, summary, [tabindex]")); }

  // New content in place of the old: what was open, scrolled, read or in focus stays so.
  function put(id, html) {
    var box = document.getElementById(id), focus = places(box).indexOf(document.activeElement);
    var open = Array.from(box.querySelectorAll("details"), function (d) { return d.open; });
    var scrolled = Array.from(box.querySelectorAll(".scroll"), function (s) { return [s.scrollLeft, s.scrollTop]; });
    var at = Array.from(box.querySelectorAll("svg[data-low]"), function (s) { return s.dataset.at; });
    box.innerHTML = html;
    box.querySelectorAll("details").forEach(function (d, k) { d.open = !!open[k]; });
    box.querySelectorAll(".scroll").forEach(function (s, k) {
      if (scrolled[k]) { s.scrollLeft = scrolled[k][0]; s.scrollTop = scrolled[k][1]; }
    });
    box.querySelectorAll("svg[data-low]").forEach(function (s, k) {
      if (at[k] === undefined) return;
      s.dataset.at = at[k];
      s.dispatchEvent(new Event("redrawn", { bubbles: true }));
    });
    if (focus >= 0 && places(box)[focus]) places(box)[focus].focus({ preventScroll: true });
  }

  source.onopen = function () { say("Live: this page follows the runs."); };
  source.onerror = function () { say("The server does not answer. What is here is the last that it said.", true); };
  source.addEventListener("ended", function () { source.close(); say("The server has ended. What is here is the last that it said.", true); });
  source.onmessage = function (e) {
    var told = JSON.parse(e.data);
    arrange(cards, told.cards.map(function (card) { return card[0]; }), "section", function () { return "card"; });
    told.cards.forEach(function (card) {
      arrange(document.getElementById(card[0]), card[1], "div", function (id) { return id.replace(/^r-[0-9a-f]+-/, "part "); });
    });
    Object.keys(told.parts).forEach(function (id) { put(id, told.parts[id]); });
  };

  document.addEventListener("click", function (e) {
    var button = e.target.closest("[data-stop]");
    if (!button) return;
    dialog.dataset.run = button.dataset.stop;
    document.getElementById("stop-name").textContent = button.dataset.name;
    dialog.showModal();
  });
  document.getElementById("stop-no").addEventListener("click", function () { dialog.close(); });
  document.getElementById("stop-yes").addEventListener("click", function () {
    dialog.close();
    fetch("./stop?id=" + dialog.dataset.run, { method: "POST" }).then(function (answer) {
      if (!answer.ok) return answer.text().then(function (text) { say(text, true); });
    }, function () { say("The server did not answer: nothing was asked.", true); });
  });
})();
