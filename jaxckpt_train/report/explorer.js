"use strict";
// The tree of leaves, to open key by key or to search by a pattern. Rows are created when they become visible.
const Explorer = (() => {
  const PAGE = 200;
  const FEW = 5;  // up to this many branches are open at the start

  function sizeText(bytes) {
    const units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let unit = 0;
    while (bytes >= 1024 && unit < units.length - 1) { bytes /= 1024; unit += 1; }
    return unit === 0 ? `${bytes} B` : `${bytes.toFixed(1)} ${units[unit]}`;
  }

  // As in the library: `*` matches within a key, `**` anything, `?` one character. Other text matches a part of the path.
  function matcher(pattern) {
    if (!/[*?]/.test(pattern)) {
      const wanted = pattern.toLowerCase();
      return (name) => name.toLowerCase().includes(wanted);
    }
    const meaning = { "**": "[^]*", "*": "[^/]*", "?": "[^/]" };
    const pieces = pattern.match(/\*\*|\*|\?|[^*?]+/g);
    const escape = (text) => text.replace(/[.+^${}()|[\]\\/]/g, "\\$&");
    const whole = new RegExp(`^(?:[^/]*/)?(?:${pieces.map((piece) => meaning[piece] || escape(piece)).join("")})$`, "u");
    return (name) => whole.test(name);
  }

  function treeOf(leaves) {
    const root = { name: "", bytes: 0, leaves: 0, children: new Map() };
    for (const leaf of leaves) {
      const keys = leaf.name.split("/");
      let node = root;
      keys.forEach((key, depth) => {
        node.bytes += leaf.bytes;
        node.leaves += 1;
        const isLast = depth === keys.length - 1;
        const label = isLast ? `leaf ${key}` : key;  // a leaf and a branch may have the same name
        if (!node.children.has(label)) {
          node.children.set(label, isLast ? { name: key, leaf, bytes: leaf.bytes } : { name: key, bytes: 0, leaves: 0, children: new Map() });
        }
        node = node.children.get(label);
      });
    }
    return root;
  }

  function cell(tag, name, text) {
    const made = document.createElement(tag);
    if (name) made.className = name;
    if (text !== undefined) made.textContent = text;
    return made;
  }

  function changeText(change) {
    if (change === null || change === undefined) return "";
    return typeof change === "number" ? (change === 0 ? "equal" : change.toExponential(1)) : change;
  }

  function fill(row, name, form, bytes, total, change) {
    const share = cell("span", "share");
    const filled = cell("i");
    filled.style.width = `${total ? (100 * bytes) / total : 0}%`;
    share.append(filled);
    row.append(cell("span", "", name), cell("span", "form", form), cell("span", "size", sizeText(bytes)), share, cell("span", "change", changeText(change)));
    return row;
  }

  function leafRow(leaf, name, total) {
    return fill(cell("div", "leaf"), name, leaf.form, leaf.bytes, total, leaf.change);
  }

  // Add rows page by page: ten thousand at once would block the browser for seconds.
  function addRows(place, items, make) {
    let shown = 0;
    const more = cell("button", "more");
    more.type = "button";
    const show = () => {
      const part = document.createDocumentFragment();
      for (const item of items.slice(shown, shown + PAGE)) part.append(make(item));
      shown = Math.min(shown + PAGE, items.length);
      place.insertBefore(part, more.parentNode === place ? more : null);
      if (shown === items.length) { more.remove(); return; }
      more.textContent = `Show ${Math.min(PAGE, items.length - shown)} of ${(items.length - shown).toLocaleString("en")} more`;
      place.append(more);
    };
    more.addEventListener("click", show);
    show();
  }

  function start(data) {
    const place = document.getElementById("leaves");
    if (!place) return;
    const leaves = data.leaves.map(([name, form, bytes, change]) => ({ name, form: data.forms[form], bytes, change }));
    const root = treeOf(leaves);
    const pattern = document.getElementById("leaf-pattern");
    const order = document.getElementById("leaf-order");
    const count = document.getElementById("leaf-count");
    const changed = data.pair ? ` The change is the relative one from step ${data.pair[0]} to ${data.pair[1]}.` : "";
    const bySize = () => order.getAttribute("aria-pressed") === "true";
    const sorted = (items) => (bySize() ? [...items].sort((a, b) => b.bytes - a.bytes) : [...items]);

    function nodeRow(node) {
      if (node.leaf) return leafRow(node.leaf, node.name, root.bytes);
      const branch = cell("details");
      const summary = fill(cell("summary"), node.name, `${node.leaves.toLocaleString("en")} ${node.leaves === 1 ? "leaf" : "leaves"}`, node.bytes, root.bytes);
      const inner = cell("div");
      branch.append(summary, inner);
      branch.addEventListener("toggle", () => {
        if (branch.open && !inner.hasChildNodes()) addRows(inner, sorted(node.children.values()), nodeRow);
      });
      return branch;
    }

    function show() {
      const head = cell("div", "leaf head");
      const names = [["", "leaf"], ["form", "form"], ["size", "size"], ["share", "share"], ["change", data.pair ? "change" : ""]];
      head.append(...names.map(([name, text]) => cell("span", name, text)));
      place.replaceChildren(head);
      const wanted = pattern.value.trim();
      if (!wanted) {
        count.textContent = changed.trim();
        addRows(place, sorted(root.children.values()), nodeRow);
        if (root.children.size <= FEW) place.querySelectorAll("details").forEach((branch) => { branch.open = true; });
        return;
      }
      const matches = matcher(wanted);
      const found = leaves.filter((leaf) => matches(leaf.name));
      const bytes = found.reduce((sum, leaf) => sum + leaf.bytes, 0);
      count.textContent = `${found.length.toLocaleString("en")} of ${leaves.length.toLocaleString("en")} leaves, ${sizeText(bytes)}.${changed}`;
      addRows(place, sorted(found), (leaf) => leafRow(leaf, leaf.name, root.bytes));
    }

    let waiting = 0;
    pattern.addEventListener("input", () => { clearTimeout(waiting); waiting = setTimeout(show, 80); });
    order.addEventListener("click", () => { order.setAttribute("aria-pressed", String(!bySize())); show(); });
    document.getElementById("leaf-close").addEventListener("click", () => {
      pattern.value = "";
      show();
      place.querySelectorAll("details").forEach((branch) => { branch.open = false; });
    });
    show();
  }

  return { start };
})();
