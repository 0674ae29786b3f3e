"""The HTML of the live page: one file, nothing from the network; texts of a run are set as text, never read as HTML."""

PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>NAME</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">
<style nonce="NONCE">STYLE
.top { display: flex; align-items: center; gap: 1em } h1 { margin: .3em 0 } #lost { color: #b00 }
.cards { display: flex; flex-wrap: wrap; gap: .6em; margin: .7em 0 }
.cards span { border: 1px solid var(--line); border-radius: .5em; padding: .2em .8em }
.cards b { font-size: 1.15em } .flow { gap: .6em 2.2em } .flow span { position: relative }
.flow span + span::before { content: "→"; position: absolute; left: -1.65em } .flow b { font-size: 1.4em }
#advice { border-left: 4px solid #009e73; background: rgba(0, 158, 115, .1); padding: .6em 1em }
#pictures img { max-width: 100% } #helps td:first-child { white-space: nowrap; font-weight: 600 }
#waits td { white-space: nowrap } [data-uid], #steps td { cursor: pointer }
#prompt { border-left: 3px solid #0072b2; padding-left: 1em }
pre { white-space: pre-wrap; overflow-wrap: anywhere; max-height: 20em; overflow-y: auto }
</style></head><body>
<div class="top"><h1 id="name"></h1><button id="pause">pause this page</button><span id="lost"></span></div>
<div class="cards" id="head"></div>
<p id="flow_of"></p><div class="cards flow" id="flow"></div>
<h2>What to change</h2><p id="advice"></p><table id="helps"></table>
<h2>Engines</h2>
<p><button id="in">zoom in</button> <button id="out">zoom out</button> <button id="earlier">earlier</button>
<button id="later">later</button> <button id="latest">latest</button>
A click on a bar, or on a prompt below, shows the prompt. A pale bar is a request that has not ended. The
colour is that of its weight version: colours repeat after seven, and the pointer on a bar names the version. While
the gate is closed the model is trained, and requests wait. A row is where a request found room in the drawing: it
is no certain slot of the engine. The numbers above are those of the steps.</p>
<div id="lanes"></div><figure id="pictures"></figure>
<div id="prompt" hidden><h2 id="uid"></h2><button id="close">close</button><div id="texts"></div>
<table id="told"></table></div>
<h2>Oldest prompts, and what they wait for</h2>
<p>Prompts that workers have begun and that are not complete, the oldest first: how long ago each was begun, which of
its trajectories are unfinished, what these wait for and how long already. Those that wait for the same stand
together.</p>
<p id="waiting"></p><table id="waits"></table>
<h2>Steps</h2><p id="line"></p>
<h3>Why did a step take so long, and what did its interruption cost? Click on a row, or type a step:
<input id="which" type="number" min="1" placeholder="last that ended" size="13"></h3>
<p>The usual step is the median of up to ten steps before it and ten after it, so it moves a little while further steps
end. A cost is an estimate, and <i>so far</i> until all that was interrupted has gone on.</p><ul id="why"></ul>
<table id="steps"></table><h2>Curves</h2><div class="charts" id="charts"></div>
<h2>GPU seconds by cause</h2>
<p>Of all steps that have ended, the first ones too; without the seconds between steps. What a step calls
<i>generation</i> is here <i>generating</i>, <i>re-prefill</i>, <i>waiting for the longest</i> and <i>drain</i>, where
engines have no GPUs of their own.</p><table id="causes"></table>
<h2>What it showed so far</h2><table id="summary"></table>
<h2>Warnings, errors and faults</h2><table id="messages"></table>
<script nonce="NONCE">
const at = name => document.getElementById(name);
const WAITS = ["data row", "prompt", "begun", "who", "turn", "waits for", "how long", "tokens",
  "interruptions of all of them"];
const STEPS = ["step", "seconds", "times the usual", "what took longer", "interrupted", "cost of it",
  "requests in slots", "pending", "seconds in no step"];
const CAUSES = ["cause", "GPU seconds", "share", "", "what it is"], MESSAGES = ["kind", "text", "", "what to change"];
let paused = false, seconds = 120, back = 0, timer = 0, drawn = "";
function make(tag, text) { return Object.assign(document.createElement(tag), {textContent: text}); }
function line(tag, cells) { const row = make("tr", ""); row.append(...cells.map(cell => make(tag, cell))); return row; }
function table(name, rows, head, uids) {
  const lines = rows.map((cells, number) => {
    const row = line("td", cells);
    if (uids) row.dataset.uid = uids[number];
    return row;
  });
  at(name).replaceChildren(...(head && rows.length ? [line("th", head)] : []), ...lines);
}
function show(pictures) {  // anew only where they have changed
  if (drawn === JSON.stringify(pictures)) return;
  drawn = JSON.stringify(pictures);
  at("pictures").replaceChildren(...pictures.flatMap(([name, time]) => {
    const image = make("img", "");
    image.alt = name; image.src = `picture${location.search}&name=${encodeURIComponent(name)}&of=${time}`;
    return [image, make("figcaption", name)];
  }));
}
function pairs(name, values) {
  at(name).replaceChildren(...values.map(([label, value]) => {
    const part = make("span", label + " "); part.append(make("b", value), " "); return part;
  }));
}
async function ask(path, more) {
  const answer = await fetch(path + location.search + more);
  if (!answer.ok) throw new Error(await answer.text());
  return answer.json();
}
async function look() {
  clearTimeout(timer);
  try {
    const which = at("which").value ? `&step=${at("which").value}` : "";
    const now = await ask("state", `&window=${seconds}&back=${back}${which}`);
    at("name").textContent = now.name; at("line").textContent = now.line; at("lost").textContent = "";
    at("advice").textContent = now.advice;
    pairs("head", now.head); pairs("flow", now.flow); at("flow_of").textContent = now.flow_of;
    table("waits", now.waits.map(wait => wait.slice(1)), WAITS, now.waits.map(wait => wait[0]));
    at("waiting").textContent = now.waiting;
    at("why").replaceChildren(...now.why.map(said => make("li", said)));
    table("helps", now.helps); table("steps", now.steps, STEPS); table("causes", now.causes, CAUSES);
    table("summary", now.summary); show(now.pictures);
    if (now.messages.length) table("messages", now.messages, MESSAGES); else table("messages", [["none"]]);
    at("lanes").innerHTML = now.lanes; at("charts").innerHTML = now.charts;  // drawings, made with escaped texts
    document.body.dataset.step = now.step;
  } catch (error) { at("lost").textContent = "no answer from the server: " + error.message; }
  if (!paused) timer = setTimeout(look, 2000);
}
function move(factor, by) {
  seconds = Math.min(3600, Math.max(1, seconds * factor)); back = Math.max(0, back + by * seconds); look();
}
at("pause").onclick = () => {
  paused = !paused; at("pause").textContent = paused ? "go on" : "pause this page";
  if (!paused) look(); else clearTimeout(timer);
};
at("in").onclick = () => move(0.5, 0); at("out").onclick = () => move(2, 0);
at("earlier").onclick = () => move(1, 0.5); at("later").onclick = () => move(1, -0.5);
at("latest").onclick = () => { back = 0; look(); };
at("which").onchange = look;
at("steps").onclick = event => {
  const row = event.target.closest("tr");
  if (row && row.rowIndex) { at("which").value = row.cells[0].textContent; look(); }
};
at("close").onclick = () => { at("prompt").hidden = true; };
document.body.addEventListener("click", async event => {
  const found = event.target.closest("[data-uid]");
  if (!found) return;
  try {
    const seen = await ask("prompt", "&uid=" + encodeURIComponent(found.dataset.uid));
    at("prompt").hidden = false; at("uid").textContent = "prompt " + seen.uid;
    table("told", seen.left_out ? [...seen.events, ["", "", `and ${seen.left_out} more`]] : seen.events);
    const texts = seen.texts.flatMap(([who, versions, prompt, response]) =>
      [make("p", [who, versions].filter(Boolean).join("; ")),
       ...[prompt, response].filter(Boolean).map(text => make("pre", text))]);
    at("texts").replaceChildren(...(seen.note ? [make("p", seen.note)] : []), ...texts);
  } catch (error) { at("lost").textContent = error.message; }
});
look();
</script></body></html>
"""
