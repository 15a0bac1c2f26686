"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const byVersion = new Map(data.map((d) => [d.v, d]));
  const tip = document.getElementById("tip");
  const root = document.documentElement;
  const count = (n) => n.toLocaleString("en-US");
  const help = {};
  for (const item of document.querySelectorAll(".legend li")) {
    const name = item.querySelector("b");
    if (name) help[name.textContent] = item.textContent.trim();
  }

  // `P*42 X*7` -> [{name, start, stop}]
  const runs = (text) => {
    let at = 0;
    return (text ? text.split(" ") : []).map((word) => {
      const star = word.lastIndexOf("*");
      return { name: word.slice(0, star), start: at, stop: (at += Number(word.slice(star + 1))) };
    });
  };
  for (const d of data) {
    d.runs = runs(d.labels);
    d.tags = runs(d.precisions);
    d.length = d.runs.length ? d.runs[d.runs.length - 1].stop : 0;
  }
  const find = (list, at) => {
    let low = 0, high = list.length - 1;
    while (low <= high) {
      const mid = (low + high) >> 1;
      if (list[mid].stop <= at) low = mid + 1;
      else if (list[mid].start > at) high = mid - 1;
      else return list[mid];
    }
    return null;
  };

  // The text of each token: what is new comes from the log, all else from the parent by the diff; undefined where neither tells.
  const texts = (d) => {
    const line = [];
    for (let v = d; v && !v.texts; v = byVersion.get(v.parent)) line.push(v);
    for (const v of line.reverse()) {
      const parent = byVersion.get(v.parent);
      const before = parent && parent.texts ? parent.texts.concat(parent.reply || []).slice(0, v.old) : [];
      const out = new Array(v.length).fill(undefined);
      let at = 0, taken = 0;
      const fresh = (stop) => {
        for (; at < stop; at++) if (v.fresh) out[at] = v.fresh[taken++];
      };
      for (const [old, start, length] of v.aligned) {
        fresh(start);
        for (let i = 0; i < length; i++) out[start + i] = before[old + i];
        at = start + length;
      }
      fresh(v.length);
      v.texts = out;
    }
    return d.texts;
  };

  // -- strips ---------------------------------------------------------------------------------------------------------
  const LAST = "PFSNXR"; // what is few and matters is drawn last, and never narrower than two pixels
  const strips = new Map();
  const draw = (canvas) => {
    const { d, cursor } = strips.get(canvas);
    const width = canvas.clientWidth, scale = window.devicePixelRatio || 1;
    if (!width || !d.length) return;
    const style = getComputedStyle(root);
    const colour = (name) => style.getPropertyValue(name).trim();
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(26 * scale);
    const pen = canvas.getContext("2d");
    const unit = canvas.width / d.length, band = Math.round(19 * scale);
    const sums = {};
    for (const label of LAST) {
      pen.fillStyle = colour(`--c-${label}`);
      for (const run of d.runs) {
        if (run.name !== label) continue;
        sums[label] = (sums[label] || 0) + run.stop - run.start;
        let left = run.start * unit, size = (run.stop - run.start) * unit;
        if ("XRN".includes(label) && size < 2 * scale) {
          left = Math.min(left, canvas.width - 2 * scale);
          size = 2 * scale;
        }
        pen.fillRect(left, 0, size, band);
      }
    }
    if (d.messages && d.messages.length * 6 < width) {
      pen.fillStyle = colour("--card");
      for (const [start] of d.messages) if (start) pen.fillRect(Math.round(start * unit), 0, Math.max(scale, 1), band);
    }
    for (const tag of d.tags) {
      if (tag.name === "-") continue;
      pen.fillStyle = colour(`--t-${tag.name}`) || colour("--t-other");
      pen.fillRect(tag.start * unit, band + 3 * scale, Math.max((tag.stop - tag.start) * unit, scale), 4 * scale);
    }
    if (cursor !== null) {
      pen.fillStyle = colour("--ink");
      pen.fillRect(Math.min((cursor + 0.5) * unit, canvas.width) - scale, 0, 2 * scale, band);
    }
    canvas.dataset.drawn = "PXRFNS".split("").filter((l) => sums[l]).map((l) => `${l}:${sums[l]}`).join(" ");
  };

  const span = (text, className) => {
    const made = document.createElement("span");
    if (className) made.className = className;
    made.textContent = text;
    return made;
  };
  const shownText = (text) => (text === undefined ? "·" : text.replace(/\n/g, "⏎\n"));
  const NEAR = 28;
  const showTip = (canvas, x, y) => {
    const { d, cursor } = strips.get(canvas);
    const run = find(d.runs, cursor);
    if (!run) return;
    const aligned = d.aligned.find(([, start, length]) => start <= cursor && cursor < start + length);
    const tag = find(d.tags, cursor);
    const message = (d.messages || []).findIndex(([start, stop]) => start <= cursor && cursor < stop);
    const facts = [`token ${count(cursor)} of ${count(d.length)}`, `one of ${count(run.stop - run.start)} in a row`];
    if (aligned && aligned[0] !== aligned[1]) {
      const shift = aligned[1] - aligned[0];
      facts.push(`moved by ${shift > 0 ? "+" : "−"}${count(Math.abs(shift))}`);
    }
    if (tag && tag.name !== "-") facts.push(`stored as ${tag.name}`);
    if (message >= 0) facts.push(`message ${message + 1}, ${d.messages[message][2]}`);
    const head = document.createElement("p");
    head.append(span("", `swatch c-${run.name}`), span(help[run.name] || run.name, "strong"), span(` · ${facts.join(" · ")}`, "dim"));
    const body = document.createElement("p");
    body.className = "near";
    const all = texts(d);
    const known = all.some((text) => text !== undefined);
    const from = Math.max(cursor - NEAR, 0), to = Math.min(cursor + NEAR + 1, d.length);
    if (from) body.append(span("… ", "dim"));
    for (let at = from; at < to; at++) {
      const label = find(d.runs, at).name;
      body.append(span(known ? shownText(all[at]) : "\u2003", `m-${label}${at === cursor ? " here" : ""}${known ? "" : " cell"}`));
    }
    if (to < d.length) body.append(span(" …", "dim"));
    tip.replaceChildren(head, body);
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(8, Math.min(x - box.width / 2, window.innerWidth - box.width - 8))}px`;
    const below = y + 34;
    tip.style.top = `${below + box.height < window.innerHeight ? below : Math.max(8, y - box.height - 10)}px`;
  };
  const point = (canvas, token) => {
    const strip = strips.get(canvas), box = canvas.getBoundingClientRect();
    strip.cursor = Math.max(0, Math.min(token, strip.d.length - 1));
    draw(canvas);
    showTip(canvas, box.left + ((strip.cursor + 0.5) / strip.d.length) * box.width, box.top);
  };
  const leave = (canvas) => {
    strips.get(canvas).cursor = null;
    tip.hidden = true;
    draw(canvas);
  };
  const resized = new ResizeObserver((entries) => {
    for (const entry of entries) if (strips.get(entry.target).seen) draw(entry.target);
  });
  const seen = new IntersectionObserver(
    (entries) => {
      for (const { target, isIntersecting } of entries) {
        if (!isIntersecting || strips.get(target).seen) continue;
        strips.get(target).seen = true;
        draw(target);
      }
    },
    { rootMargin: "600px" },
  );
  for (const row of document.querySelectorAll("section.row")) {
    const canvas = row.querySelector("canvas"), d = data[Number(row.dataset.number)];
    strips.set(canvas, { d, cursor: null, seen: false });
    canvas.addEventListener("pointermove", (event) => {
      const box = canvas.getBoundingClientRect();
      point(canvas, Math.floor(((event.clientX - box.left) / box.width) * d.length));
    });
    canvas.addEventListener("pointerleave", () => leave(canvas));
    canvas.addEventListener("blur", () => leave(canvas));
    canvas.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (event.key === "Escape") leave(canvas);
      if (!step) return;
      event.preventDefault();
      const cursor = strips.get(canvas).cursor;
      point(canvas, cursor === null ? 0 : cursor + step * (event.shiftKey ? 32 : 1));
    });
    const button = row.querySelector(".kind");
    button.addEventListener("click", () => open(row, row.querySelector(".details").hidden));
    canvas.addEventListener("click", () => open(row, row.querySelector(".details").hidden));
    if (canvas.getBoundingClientRect().top < 2 * window.innerHeight) {
      strips.get(canvas).seen = true;
      draw(canvas);
    }
    resized.observe(canvas);
    seen.observe(canvas);
  }

  // -- details --------------------------------------------------------------------------------------------------------
  const ENDS = 40;
  const open = (row, wanted) => {
    const details = row.querySelector(".details");
    details.hidden = !wanted;
    row.querySelector(".kind").setAttribute("aria-expanded", String(wanted));
    const place = details.querySelector(".text");
    if (!wanted || place.childElementCount) return;
    const d = data[Number(row.dataset.number)], all = texts(d);
    if (!all.some((text) => text !== undefined)) {
      place.append(span("The log has no text of this version.", "dim"));
      return;
    }
    for (const run of d.runs) {
      const piece = (start, stop) => span(all.slice(start, stop).map((text) => text ?? "·").join(""), `m-${run.name}`);
      const length = run.stop - run.start;
      const mark = span(`${run.name} ${count(length)}`, `mark c-${run.name}`);
      mark.title = help[run.name] || run.name;
      place.append(mark);
      if (length <= 3 * ENDS || "XR".includes(run.name)) {
        place.append(piece(run.start, run.stop));
        continue;
      }
      const more = document.createElement("button");
      more.type = "button";
      more.className = "more";
      more.textContent = `${count(length - 2 * ENDS)} tokens more`;
      more.addEventListener("click", () => more.replaceWith(piece(run.start + ENDS, run.stop - ENDS)));
      place.append(piece(run.start, run.start + ENDS), more, piece(run.stop - ENDS, run.stop));
    }
  };

  // -- light and dark, and links to a version (#v3) and a token of it (#v3:120) ----------------------------------------
  const redraw = () => strips.forEach((strip, canvas) => strip.seen && draw(canvas));
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  document.getElementById("theme").addEventListener("click", () => {
    const now = root.dataset.theme || (dark.matches ? "dark" : "light");
    root.dataset.theme = now === "dark" ? "light" : "dark";
    redraw();
  });
  dark.addEventListener("change", redraw);
  const follow = () => {
    const [id, token] = window.location.hash.slice(1).split(":");
    const row = id && document.getElementById(id);
    if (!row || !row.matches("section.row")) return;
    row.closest("details").open = true;
    row.scrollIntoView({ block: "center" });
    open(row, true);
    const canvas = row.querySelector("canvas");
    strips.get(canvas).seen = true;
    draw(canvas);
    if (token !== undefined) point(canvas, Number(token));
  };
  window.addEventListener("hashchange", follow);
  follow();
})();
