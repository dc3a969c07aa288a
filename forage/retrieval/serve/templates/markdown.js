"use strict";
// Renders common Markdown as elements. A passage is untrusted: it only ever becomes text, so it
// cannot add markup, scripts or images, and its links lead only to web pages.

function element(name, className, text) {
  const made = document.createElement(name);
  made.className = className;
  made.textContent = text;  // never innerHTML
  return made;
}

// Lengths are limited so that an opening mark without a closing one costs little.
const INLINE = new RegExp([
  /(?<tick>`{1,8})(?<code>[^`](?:.{0,1000}?[^`])?)\k<tick>(?!`)/,
  /(?<image>!?)\[(?<label>[^\][]{0,400})\]\((?<target>[^()\s]{0,1000})(?:\s[^()]{0,200})?\)/,
  /<(?<address>https?:\/\/[^<>\s]{1,1000})>/,
  /(?<!\w)(?<two>\*\*|__)(?=\S)(?<strong>.{1,400}?)(?<=\S)\k<two>(?!\w)/,
  /(?<!\w)(?<one>[*_])(?=\S)(?<em>.{1,400}?)(?<=\S)\k<one>(?!\w)/,
  /\\(?<escaped>[!-/:-@[-`{-~])/,
].map((pattern) => pattern.source).join("|"), "gsu");

// Appends nodes one by one: a call with all of them would overflow the stack.
function fill(parent, nodes) {
  for (const node of nodes) parent.append(node);
  return parent;
}

// Fills an element with one paragraph; leaf(text) makes the nodes of plain text.
function inline(parent, text, leaf) {
  let end = 0;
  for (const match of text.matchAll(INLINE)) {
    const found = match.groups;
    fill(parent, leaf(text.slice(end, match.index)));
    end = match.index + match[0].length;
    const target = found.target ?? found.address;
    if (found.code !== undefined) parent.append(fill(element("code", "", ""), leaf(found.code)));
    else if (found.strong !== undefined) parent.append(inline(element("strong", "", ""), found.strong, leaf));
    else if (found.em !== undefined) parent.append(inline(element("em", "", ""), found.em, leaf));
    else if (found.image) parent.append(element("em", "", `[image: ${found.label}]`));
    else if (found.escaped !== undefined) parent.append(found.escaped);
    else {
      const isWeb = /^https?:\/\//i.test(target);
      const link = element(isWeb ? "a" : "span", "", found.address ?? "");
      if (isWeb) Object.assign(link, { href: target, target: "_blank", rel: "noreferrer noopener" });
      parent.append(inline(link, found.label ?? "", leaf));
    }
  }
  return fill(parent, leaf(text.slice(end)));
}

const FENCE = /^ {0,3}(?:```|~~~)/, HEADING = /^ {0,3}(#{1,6})\s+(.*?)[\s#]*$/;
const ITEM = /^(\s*)(?:[-*+]|(\d{1,9})[.)])\s+(.*)$/, QUOTE = /^ {0,3}>\s?/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/, COLUMNS = /^\|?\s*:?-+:?\s*(?:\|\s*:?-+:?\s*)*\|?$/;
const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|");

function tableOf(lines, leaf) {
  const table = element("table", "", "");
  for (const line of lines) {
    const row = element("tr", "", "");
    for (const text of cells(line)) {
      const cell = element(table.hasChildNodes() ? "td" : "th", "", "");
      row.append(inline(cell, text.trim(), leaf));
    }
    table.append(row);
  }
  const frame = element("div", "scroll", "");
  frame.append(table);
  return frame;
}

function markdown(text, leaf) {
  const body = element("div", "markdown", "");
  const lines = text.split(/\r?\n/);
  const blocks = [];
  const put = (name, words, parent = body) => {
    const block = { name, words, made: element(name, "", "") };
    parent.append(block.made);
    blocks.push(block);
    return block;
  };
  let open = null;  // the last block, as long as the next line may continue it
  for (let i = 0; i < lines.length; i++) {
    const line = lines[i];
    let match;
    if (FENCE.test(line)) {
      const code = [];
      while (++i < lines.length && !FENCE.test(lines[i])) code.push(lines[i]);
      body.append(fill(element("pre", "", ""), leaf(code.join("\n"))));
      open = null;
    } else if (!line.trim() || RULE.test(line)) {
      open = null;
    } else if ((match = HEADING.exec(line))) {
      put(`h${Math.min(6, match[1].length + 2)}`, match[2]);
      open = null;
    } else if (line.includes("|") && COLUMNS.test((lines[i + 1] || "").trim())) {
      const rows = [line];
      for (i += 2; i < lines.length && lines[i].includes("|"); i++) rows.push(lines[i]);
      i--;
      body.append(tableOf(rows, leaf));
      open = null;
    } else if ((match = ITEM.exec(line))) {
      const name = match[2] === undefined ? "ul" : "ol";
      if (body.lastChild?.localName !== name) body.append(element(name, "", ""));
      if (match[2] !== undefined && !body.lastChild.hasChildNodes()) body.lastChild.start = Number(match[2]);
      open = put("li", match[3], body.lastChild);
      open.made.style.marginLeft = `${Math.min(match[1].length, 16) / 2}em`;
    } else {
      const name = QUOTE.test(line) ? "blockquote" : "p";
      const words = line.trim().replace(/^(?:>\s?)+/, "");
      if (open !== null && (open.name === name || open.name === "li")) open.words += `\n${words}`;
      else open = put(name, words);
    }
  }
  for (const block of blocks) inline(block.made, block.words, leaf);
  return body;
}
