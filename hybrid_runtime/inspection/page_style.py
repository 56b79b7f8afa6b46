"""Style and script of the page: all it needs, so that it works from a file and offline."""

from __future__ import annotations

STYLE = """
:root { color-scheme: light dark; --bg: #fff; --fg: #1c2024; --dim: #6b7280; --line: #e2e5e9; --hover: #f3f5f8;
  --state: #15803d; --tomb: #9aa3ad; --lock: #c2570c; --bar: #dbe7ff; --run: #9ec1fa; }
@media (prefers-color-scheme: dark) { :root { --bg: #14171a; --fg: #e3e6e9; --dim: #8d959e; --line: #2b3036;
  --hover: #1d2226; --state: #4ade80; --tomb: #6b747d; --lock: #fb923c; --bar: #22365c; --run: #35609f; } }
body { margin: 0 auto; padding: 20px 24px 60px; max-width: 1500px; background: var(--bg); color: var(--fg);
  font: 14px/1.45 system-ui, sans-serif; }
h1 { font-size: 20px; margin: 0 0 2px; }
.note { color: var(--dim); margin: 0 0 14px; }
.totals { display: flex; flex-wrap: wrap; gap: 8px 28px; margin: 0 0 16px; }
.totals div { display: flex; flex-direction: column-reverse; }
.totals dt { color: var(--dim); font-size: 12px; }
.totals dd { margin: 0; font-size: 19px; font-variant-numeric: tabular-nums; }
figure { margin: 0 0 16px; }
figcaption, .legend { color: var(--dim); font-size: 12px; }
.legend { display: flex; flex-wrap: wrap; gap: 0 16px; }
svg { display: block; width: 100%; height: auto; border-bottom: 1px solid var(--line); }
svg rect { fill: var(--run); }
svg rect.tomb { fill: var(--tomb); opacity: .55; }
svg rect.locked { fill: var(--lock); opacity: .55; }
svg rect.state { fill: var(--state); }
svg text { fill: var(--dim); font: 11px system-ui, sans-serif; }
.buttons { margin: 14px 0 6px; }
.tree { font: 12.5px/1.5 ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; overflow-x: auto; }
.r { display: grid; grid-template-columns: 4.5em 4.5em 11em 3.5em 3em 4em 7em minmax(22em, 1fr); gap: 0 10px;
  padding: 1px 0; min-width: 860px; font-variant-numeric: tabular-nums; }
.r:hover { background: var(--hover); }
.r > * { text-align: right; white-space: pre; font-style: normal; }
.r > .s, .r > .t { text-align: left; }
.head { color: var(--dim); border-bottom: 1px solid var(--line); position: sticky; top: 0; background: var(--bg); }
summary { cursor: pointer; list-style: none; }
summary::-webkit-details-marker { display: none; }
.t { --in: min(var(--d, 0) * 14px, 45%); padding-left: calc(var(--in) + 14px); white-space: pre-wrap;
  overflow-wrap: anywhere; unicode-bidi: isolate; position: relative;
  background: repeating-linear-gradient(to right, var(--line) 0 1px, transparent 1px 14px) 6px 0 / var(--in) 100%
  no-repeat; }
summary > .t::before { content: "\\25b8"; position: absolute; margin-left: -14px; color: var(--dim); }
details[open] > summary > .t::before { content: "\\25be"; }
.s { color: var(--state); }
.head > .s { color: inherit; }
.s.none { color: var(--tomb); }
.l { color: var(--lock); }
.u, .more { color: var(--dim); }
.b { background: linear-gradient(var(--bar) 0 0) right / var(--p, 0%) 100% no-repeat; }
"""

# Without it everything can be read too, one click for each fold.
SCRIPT = """
for (const [id, open] of [["expand", true], ["collapse", false]]) {
  const button = document.getElementById(id);
  button.hidden = false;
  button.onclick = () => { for (const each of document.querySelectorAll("details")) each.open = open; };
}
"""
