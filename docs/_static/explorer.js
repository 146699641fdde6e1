/* The draft-tree explorer. The upper half is the contract in plain JavaScript, float64 in the order of operations that
   docs/contract.md fixes; the tests compare it with vectors from the NumPy reference. The lower half is the page. */
"use strict";

const ddtree = (function () {
  const BROKEN_LINK = 1, TOO_DEEP = 2;

  /* Rank paths in lexicographic order, a prefix before its extensions. */
  function comparePaths(a, b) {
    for (let i = 0; i < Math.min(a.length, b.length); i++) if (a[i] !== b[i]) return a[i] - b[i];
    return a.length - b.length;
  }

  function comesFirst(a, b) {
    return a.score !== b.score ? a.score > b.score : comparePaths(a.path, b.path) < 0;
  }

  /* logProbs and tokenIds [L][K] -> one request's tree as columns, and what is left on the frontier, best first. */
  function buildTree(logProbs, tokenIds, rootToken, budget) {
    const tree = {
      token_ids: [rootToken], parents: [-1], depths: [0], first_child: [-1], next_sibling: [-1], log_probs: [0],
      paths: [[]],
    };
    const frontier = [];
    function offer(score, path, parent, previous) {
      const logProb = Math.fround(logProbs[path.length - 1][path[path.length - 1]]);
      if (Number.isFinite(logProb)) frontier.push({ score: score + logProb, path, parent, previous });
    }
    if (logProbs.length) offer(0, [0], 0, -1);
    while (frontier.length && tree.parents.length <= budget) {
      let best = 0;
      for (let i = 1; i < frontier.length; i++) if (comesFirst(frontier[i], frontier[best])) best = i;
      const [{ score, path, parent, previous }] = frontier.splice(best, 1);
      const slot = tree.parents.length, depth = path.length, rank = path[depth - 1];
      tree.token_ids.push(tokenIds[depth - 1][rank]);
      tree.parents.push(parent);
      tree.depths.push(depth);
      tree.first_child.push(-1);
      tree.next_sibling.push(-1);
      tree.log_probs.push(score);
      tree.paths.push(path);
      if (previous < 0) tree.first_child[parent] = slot;
      else tree.next_sibling[previous] = slot;
      if (rank + 1 < logProbs[depth - 1].length)
        offer(score - Math.fround(logProbs[depth - 1][rank]), [...path.slice(0, -1), rank + 1], parent, slot);
      if (depth < logProbs.length) offer(score, [...path, 0], slot, -1);
    }
    tree.frontier = frontier.sort((a, b) => (comesFirst(a, b) ? -1 : 1));
    return tree;
  }

  /* Visibility rows as uint32 words, least significant bit first. */
  function ancestorBits(parents) {
    const words = Math.ceil(parents.length / 32), rows = [];
    parents.forEach(function (parent, slot) {
      const row = parent < 0 ? new Array(words).fill(0) : rows[parent].slice();
      row[slot >>> 5] = (row[slot >>> 5] | (1 << (slot & 31))) >>> 0;
      rows.push(row);
    });
    return rows;
  }

  /* The walk along the sibling chain; targetTokens holds the target's token after each slot. */
  function acceptWalk(tree, targetTokens, draftLength) {
    const count = tree.parents.length, slots = [0];
    let status = 0, unseen = count - 1;
    for (;;) {
      const node = slots[slots.length - 1];
      let child = tree.first_child[node];
      while (child !== -1) {
        if (child <= node || child >= count || unseen === 0) { status |= BROKEN_LINK; break; }
        unseen -= 1;
        if (tree.token_ids[child] === targetTokens[node]) break;
        child = tree.next_sibling[child];
      }
      if (child === -1 || status) break;
      if (slots.length > draftLength) { status |= TOO_DEEP; break; }
      slots.push(child);
    }
    return { slots, tokens: slots.map((slot) => targetTokens[slot]), status };
  }

  return { buildTree, ancestorBits, acceptWalk };
})();

/* ---- the page ---- */
(function () {
  const page = document.getElementById("ddtree-explorer");
  if (!page) return;
  const ELSE = "(else)", ELSE_ID = -1;
  const PRESETS = {
    "a fair drafter": [[["the", 0.55], ["a", 0.3], ["one", 0.1]], [["cat", 0.5], ["dog", 0.35], ["car", 0.1]],
      [["sat", 0.6], ["ran", 0.25], ["is", 0.1]], [["down", 0.45], ["up", 0.3], ["on", 0.2]]],
    "a sure drafter": [[["the", 0.97], ["a", 0.02], ["one", 0.01]], [["cat", 0.95], ["dog", 0.03], ["car", 0.01]],
      [["sat", 0.9], ["ran", 0.05], ["is", 0.04]], [["down", 0.85], ["up", 0.1], ["on", 0.04]]],
    "all tied": [[["the", 0.25], ["a", 0.25], ["one", 0.25]], [["cat", 0.25], ["dog", 0.25], ["car", 0.25]],
      [["sat", 0.25], ["ran", 0.25], ["is", 0.25]]],
  };
  let rows, budget = 8, wants = {};

  function element(tag, attributes, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes || {})) made.setAttribute(name, value);
    made.append(...children);
    return made;
  }
  function svgElement(tag, attributes, text) {
    const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    if (text !== undefined) made.textContent = text;
    return made;
  }
  const at = (name) => page.querySelector(`[data-part="${name}"]`);

  function load(preset) {
    rows = PRESETS[preset].map((row) => row.map(([word, p]) => ({ word, p })));
    // To begin with, the target writes the second token of depth 2 after the first of depth 1: a walk with a turn.
    wants = { "": 0, 0: rows[0].length + 1 };
    drawInputs();
    update();
  }

  function drawInputs() {
    const table = element("table", { class: "explorer-table" });
    rows.forEach(function (row, depth) {
      const line = element("tr", {}, element("th", { scope: "row" }, `depth ${depth + 1}`));
      row.forEach(function (candidate, place) {
        const word = element("input", { type: "text", maxlength: 7, "aria-label": `token ${place + 1} of depth ${depth + 1}` });
        const p = element("input", { type: "number", min: 0, max: 1, step: 0.01,
          "aria-label": `probability of token ${place + 1} of depth ${depth + 1}` });
        word.value = candidate.word;
        p.value = candidate.p;
        word.addEventListener("input", function () { candidate.word = word.value; update(); });
        p.addEventListener("input", function () { candidate.p = Math.min(1, Math.max(0, Number(p.value) || 0)); update(); });
        line.append(element("td", {}, word, p));
      });
      table.append(line);
    });
    at("inputs").replaceChildren(table);
  }

  /* Each depth's candidates, most probable first, equal ones in the order in which they stand. */
  function candidates() {
    const words = [], logProbs = [], tokenIds = [];
    rows.forEach(function (row) {
      const first = words.length;
      row.forEach((candidate) => words.push(candidate.word || "?"));
      const order = row.map((_, place) => place).sort((a, b) => row[b].p - row[a].p || a - b);
      logProbs.push(order.map((place) => Math.fround(Math.log(row[place].p))));
      tokenIds.push(order.map((place) => first + place));
    });
    return { words, logProbs, tokenIds };
  }

  function update() {
    const { words, logProbs, tokenIds } = candidates();
    const tree = ddtree.buildTree(logProbs, tokenIds, -2, budget);
    const name = (token) => (token === -2 ? "root" : token === ELSE_ID ? ELSE : words[token]);
    const targets = tree.paths.map((path) => (path.join() in wants ? wants[path.join()] : ELSE_ID));
    const walk = ddtree.acceptWalk(tree, targets, rows.length);
    const focused = document.activeElement && document.activeElement.getAttribute("data-keep");
    at("budget").textContent = budget;
    drawNumbers(tree, walk, logProbs);
    drawTree(tree, walk, name);
    drawHeap(tree, name, tokenIds);
    drawBits(tree, name);
    drawTargets(tree, walk, name, tokenIds);
    if (focused) { const again = page.querySelector(`[data-keep="${focused}"]`); if (again) again.focus(); }
  }

  function drawNumbers(tree, walk, logProbs) {
    const drafted = tree.parents.length - 1;
    const expected = tree.log_probs.slice(1).reduce((sum, score) => sum + Math.exp(score), 0);
    let chain = 0, along = 0;
    logProbs.slice(0, drafted).forEach(function (row) { along += row[0]; chain += Math.exp(along); });
    at("numbers").textContent =
      `${drafted} drafted nodes. Expected accepted: ${expected.toFixed(3)}, a chain of the same budget ${chain.toFixed(3)}. ` +
      `This walk accepts ${walk.slots.length - 1} and emits ${walk.slots.length}, bonus included.`;
  }

  function drawTree(tree, walk, name) {
    const W = 58, H = 36, GX = 12, GY = 28, column = [], children = tree.parents.map(() => []);
    for (let slot = 1; slot < tree.parents.length; slot++) children[tree.parents[slot]].push(slot);
    let leaves = 0;
    (function settle(slot) {
      children[slot].forEach(settle);
      const below = children[slot];
      column[slot] = below.length ? (column[below[0]] + column[below[below.length - 1]]) / 2 : leaves++;
    })(0);
    const x = (slot) => 2 + column[slot] * (W + GX), y = (slot) => 2 + tree.depths[slot] * (H + GY);
    const width = leaves * (W + GX) - GX + 4, height = (Math.max(...tree.depths) + 1) * (H + GY) - GY + 4;
    const svg = svgElement("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "group",
      "aria-label": `Draft tree of ${tree.parents.length - 1} nodes`, style: `min-width:${0.75 * width}px` });
    for (let slot = 1; slot < tree.parents.length; slot++) {
      const parent = tree.parents[slot], good = walk.slots.includes(slot);
      svg.append(svgElement("polyline", { class: "edge" + (good ? " good" : ""),
        points: `${x(parent) + W / 2},${y(parent) + H} ${x(slot) + W / 2},${y(slot)}` }));
    }
    tree.parents.forEach(function (parent, slot) {
      const word = name(tree.token_ids[slot]), probability = Math.exp(tree.log_probs[slot]).toFixed(3);
      const good = walk.slots.includes(slot);
      const node = svgElement("g", slot === 0 ? {} : { tabindex: 0, role: "button", "data-keep": "node" + tree.paths[slot].join(),
        "aria-pressed": good, "aria-label": `slot ${slot}, ${word}, probability ${probability}: let the target write it` });
      node.append(
        svgElement("rect", { class: "shape" + (good ? " good" : ""), x: x(slot), y: y(slot), width: W, height: H, rx: 5 }),
        svgElement("text", { class: "mid bold", x: x(slot) + W / 2, y: y(slot) + 16 }, word),
        svgElement("text", { class: "mid small soft", x: x(slot) + W / 2, y: y(slot) + 30 }, slot === 0 ? "slot 0" : probability));
      if (slot > 0) {
        const pick = () => follow(tree, slot);
        node.addEventListener("click", pick);
        node.addEventListener("keydown", function (event) {
          if (event.key === "Enter" || event.key === " ") { event.preventDefault(); pick(); }
        });
      }
      svg.append(node);
    });
    at("tree").replaceChildren(svg);
  }

  /* The target writes the path to `slot`; pressed again, it stops before it. */
  function follow(tree, slot) {
    const parent = tree.paths[tree.parents[slot]].join();
    if (wants[parent] === tree.token_ids[slot]) delete wants[parent];
    else for (let node = slot; node > 0; node = tree.parents[node]) wants[tree.paths[tree.parents[node]].join()] = tree.token_ids[node];
    update();
  }

  function drawTargets(tree, walk, name, tokenIds) {
    const list = element("ol", {});
    walk.slots.forEach(function (slot, step) {
      const path = tree.paths[slot].join();
      const choice = element("select", { "data-keep": "want" + step, "aria-label": `the target's token after ${name(tree.token_ids[slot])}` });
      const options = [...(tokenIds[tree.depths[slot]] || []), ELSE_ID];
      options.forEach(function (token) { choice.append(element("option", { value: token }, name(token))); });
      choice.value = path in wants ? wants[path] : ELSE_ID;
      choice.addEventListener("change", function () { wants[path] = Number(choice.value); update(); });
      const last = step === walk.slots.length - 1;
      list.append(element("li", {}, `after ${name(tree.token_ids[slot])} the target writes `, choice,
        last ? ": no child holds it, it is the bonus token" : ": accepted"));
    });
    at("targets").replaceChildren(list,
      element("p", {}, "Emitted: " + walk.tokens.map((token) => name(token)).join(" ")));
  }

  function drawHeap(tree, name, tokenIds) {
    const list = element("ol", {});
    tree.frontier.slice(0, 8).forEach(function (entry) {
      const words = entry.path.map((rank, depth) => name(tokenIds[depth][rank])).join(" ");
      list.append(element("li", {}, element("code", {}, Math.exp(entry.score).toFixed(4)), ` ${words}`));
    });
    at("heap").replaceChildren(tree.frontier.length ? list : element("p", {}, "empty"));
  }

  function drawBits(tree, name) {
    const bits = ddtree.ancestorBits(tree.parents), count = tree.parents.length;
    const table = element("table", { class: "explorer-bits" });
    const head = element("tr", {}, element("td", {}));
    for (let slot = 0; slot < count; slot++) head.append(element("th", { scope: "col" }, String(slot)));
    table.append(head);
    bits.forEach(function (row, slot) {
      const line = element("tr", {}, element("th", { scope: "row" }, `${slot} ${name(tree.token_ids[slot])}`));
      for (let other = 0; other < count; other++) {
        const set = (row[other >>> 5] >>> (other & 31)) & 1;
        line.append(element("td", set ? { class: "set" } : {}, String(set)));
      }
      line.append(element("td", {}, element("code", {}, "0x" + row[0].toString(16).toUpperCase())));
      table.append(line);
    });
    at("bits").replaceChildren(table);
  }

  page.querySelectorAll("[data-preset]").forEach(function (button) {
    button.addEventListener("click", function () { load(button.dataset.preset); });
  });
  const slider = page.querySelector("input[type=range]");
  slider.addEventListener("input", function () { budget = Number(slider.value); update(); });
  budget = Number(slider.value);
  page.hidden = false;
  load("a fair drafter");
})();
