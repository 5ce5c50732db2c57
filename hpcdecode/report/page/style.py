"""The style sheet of the page: system fonts, a small palette for light and dark, no file beside it."""

from __future__ import annotations

STYLE = """
:root { color-scheme: light dark; --paper: #ffffff; --soft: #f4f6f8; --ink: #1c2128; --muted: #57606a;
  --rule: #d5dbe1; --grid: #e6eaee; --c1: #1f5fa8; --c2: #b0500f; --c3: #5d4a94; --c4: #7d8893; --bad: #a8251f; }
@media (prefers-color-scheme: dark) { :root { --paper: #14181d; --soft: #1c2229; --ink: #e6e9ec; --muted: #a4aeb9;
  --rule: #39424c; --grid: #262e37; --c1: #74b0f4; --c2: #f2a66a; --c3: #bda7f0; --c4: #8b97a3; --bad: #ff9a92; } }
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body { margin: 0; background: var(--paper); color: var(--ink); line-height: 1.5;
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", "Liberation Sans", sans-serif; }
header, main, footer { max-width: 68rem; margin: 0 auto; padding: 0 1.5rem; }
header { padding-top: 2.5rem; }
h1 { font-size: 1.75rem; line-height: 1.25; margin: 0; overflow-wrap: anywhere; letter-spacing: -.01em; }
h2 { font-size: 1.25rem; margin: 3rem 0 .25rem; padding-top: 1rem; border-top: 1px solid var(--rule); }
h3 { font-size: 1rem; margin: 1.75rem 0 .25rem; }
p { margin: .25rem 0 .75rem; max-width: 46rem; }
.muted, figcaption, footer { color: var(--muted); }
.lead { margin: .35rem 0 1.25rem; max-width: none; overflow-wrap: anywhere; }
.state { display: inline-block; border: 1px solid currentColor; border-radius: 1rem; padding: 0 .65rem;
  font-size: .875rem; margin-left: .5rem; vertical-align: .2rem; letter-spacing: 0; font-weight: 400; }
.bad { color: var(--bad); }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(8.25rem, 1fr)); gap: 1px; margin: 1rem 0 0;
  border: 1px solid var(--rule); border-radius: .5rem; overflow: hidden; }
.facts div { box-shadow: 0 0 0 1px var(--rule); padding: .7rem .9rem; display: flex; flex-direction: column; }
.facts dt { color: var(--muted); font-size: .875rem; order: 2; }
.facts dd { margin: 0; font-size: 1.25rem; font-weight: 600; font-variant-numeric: tabular-nums; line-height: 1.35;
  overflow-wrap: anywhere; }
figure { margin: 1rem 0 0; }
figcaption { font-size: .875rem; max-width: 46rem; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); gap: 0 2rem; }
.pair > * { min-width: 0; }
.scrolled { overflow-x: auto; max-width: 100%; }
.scrolled:focus-visible, summary:focus-visible { outline: 2px solid var(--c1); outline-offset: 2px; }
svg.chart { display: block; width: 100%; min-width: 40rem; height: auto; }
.pair svg.chart { min-width: 22rem; }
.chart text { font-size: 12.5px; fill: var(--muted); font-variant-numeric: tabular-nums; }
.chart text.title { fill: var(--ink); }
.chart text.mark { fill: var(--ink); paint-order: stroke; stroke: var(--paper); stroke-width: 3px; }
.chart .grid { stroke: var(--grid); }
.chart .base { stroke: var(--muted); }
.chart path, .chart line { fill: none; stroke-width: 1; }
.line1, .line2, .line3 { stroke-width: 1.75 !important; stroke-linejoin: round; }
.line1 { stroke: var(--c1); } .line2 { stroke: var(--c2); stroke-dasharray: 5 3; }
.line3 { stroke: var(--c3); stroke-dasharray: 1.5 2.5; }
.limit { stroke: var(--ink); stroke-dasharray: 9 4; stroke-width: 1.25 !important; }
.mean { stroke: var(--muted); stroke-dasharray: 2 3; stroke-width: 1.25 !important; }
.chart path.fill1 { fill: var(--c1); fill-opacity: .13; stroke: none; }
.chart path.band { fill: var(--c1); fill-opacity: .22; stroke: none; }
.chart .part { fill-opacity: .85; }
.bar1 { fill: var(--c1); } .bar2 { fill: var(--c2); } .bar3 { fill: var(--c3); } .bar4 { fill: var(--c4); }
.chart .part { stroke: var(--paper); }
.chart path.part { stroke-width: .5; }
.chart path.bar1 { fill: var(--c1); } .chart path.bar2 { fill: var(--c2); }
.chart path.bar3 { fill: var(--c3); } .chart path.bar4 { fill: var(--c4); }
.heat { fill: var(--c1) !important; stroke: none; }
.whisker { stroke: var(--c4); stroke-width: 2 !important; }
.legend { list-style: none; margin: .25rem 0 .6rem; padding: 0; display: flex; flex-wrap: wrap; gap: .1rem 1.25rem;
  font-size: .875rem; color: var(--ink); }
.legend svg { width: 26px; height: 12px; margin-right: .4rem; vertical-align: -1px; }
.legend path { fill: none; }
.legend path.bar1 { fill: var(--c1); } .legend path.bar2 { fill: var(--c2); }
.legend path.bar3 { fill: var(--c3); } .legend path.bar4 { fill: var(--c4); }
.legend path.heat { fill: var(--c1); }
.legend path.band { fill: var(--c1); fill-opacity: .22; }
table { border-collapse: collapse; margin: .75rem 0; font-size: .9375rem; font-variant-numeric: tabular-nums; }
th, td { text-align: left; vertical-align: top; padding: .3rem 1.25rem .3rem 0; border-bottom: 1px solid var(--rule); }
table.long tbody th { overflow-wrap: anywhere; min-width: 15rem; font-weight: 400; }
thead th { color: var(--muted); font-weight: 400; font-size: .875rem; white-space: nowrap; }
tbody th { font-weight: 600; }
th.number, td.number { text-align: right; white-space: nowrap; }
.share { display: inline-block; width: 14rem; max-width: 30vw; height: .8rem; background: var(--soft); }
.share span { display: block; height: 100%; background: var(--c1); }
.stack { display: flex; width: 14rem; max-width: 40vw; height: .95rem; margin-top: .25rem; gap: 1px; }
.stack .bar1 { background: var(--c1); } .stack .bar2 { background: var(--c2); }
.stack .bar3 { background: var(--c3); } .stack .bar4 { background: var(--c4); }
svg.range { width: 204px; height: 18px; display: block; }
.range .base { stroke: var(--rule); } .range .tick { stroke: var(--ink); stroke-width: 2; }
.unseen { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); white-space: nowrap; }
caption.stack { display: flex; width: 14rem; max-width: 40vw; height: .95rem; margin-top: .25rem; gap: 1px; }
.stack .bar1 { background: var(--c1); } .stack .bar2 { background: var(--c2); }
.stack .bar3 { background: var(--c3); } .stack .bar4 { background: var(--c4); }
svg.range { width: 204px; height: 18px; display: block; }
.range .base { stroke: var(--rule); } .range .tick { stroke: var(--ink); stroke-width: 2; }
.unseen { display: block; }
article { margin: 1rem 0; border: 1px solid var(--rule); border-radius: .5rem; overflow: hidden; }
article h3 { margin: 0; padding: .45rem .9rem; background: var(--soft); font-size: .9375rem; overflow-wrap: anywhere; }
article h3 span { font-weight: 400; color: var(--muted); }
article h4 { margin: .6rem .9rem 0; font-size: .875rem; font-weight: 400; color: var(--muted); }
pre { margin: .2rem .9rem .75rem; white-space: pre-wrap; overflow-wrap: anywhere; overflow: hidden;
  font: .875rem/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; }
details { margin: .75rem 0; }
summary { cursor: pointer; }
details dl { display: grid; grid-template-columns: minmax(8rem, max-content) minmax(0, 1fr); gap: .15rem 1.25rem;
  margin: .5rem 0; font-size: .9375rem; }
details dt { color: var(--muted); overflow-wrap: anywhere; }
details dd { margin: 0; overflow-wrap: anywhere; }
footer { margin-top: 3rem; padding-bottom: 3rem; font-size: .875rem; }
@media print { svg.chart { min-width: 0; } h2 { break-after: avoid; } figure, article { break-inside: avoid; } }
"""
