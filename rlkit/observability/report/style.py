"""The style sheet of the report. Light and dark by `prefers-color-scheme`; text and lines keep a contrast of at least
4.5 to 1 to what is behind them (3 to 1 for shapes).
"""

from rlkit.observability.report.charts import NUM_COLORS

STYLE = (
    """
:root { color-scheme: light dark; --bg:#fbfbfa; --card:#ffffff; --text:#1c1e21; --soft:#55595f; --line:#d9dbde;
  --accent:#0b57a4; --bad:#a4161a; --bad-bg:#fdecec; --warn:#7a4a00; --warn-bg:#fff4dc; --good:#14622f;
  --good-bg:#e7f6ec; --g1:#fde9c8; --g2:#f9c98a; --g3:#f19a6a; --g4:#e0605a; --gtext:#1c1e21; --idle:#eceef0;
  --c0:#1f6fb2; --c1:#c2571a; --c2:#2b8a3e; --c3:#8b3fb0; --c4:#b3261e; --c5:#0b7f86; --c6:#8a6d00;
  --c7:#6b7280; --c8:#9a5b7b }
@media (prefers-color-scheme: dark) { :root { --bg:#14161a; --card:#1c1f24; --text:#e7e9ec; --soft:#a9afb8;
  --line:#353a42; --accent:#7db8f5; --bad:#ff9a94; --bad-bg:#3a1b1c; --warn:#f3c26b; --warn-bg:#352a14; --good:#84d6a0;
  --good-bg:#17301f; --g1:#4a3a1c; --g2:#6e4a1a; --g3:#8a3f22; --g4:#a32c2c; --gtext:#f4f5f7; --idle:#2a2e35;
  --c0:#6cb2f0; --c1:#f09a5b; --c2:#74c98a; --c3:#cf9bea; --c4:#ff8a80; --c5:#5fcbd1; --c6:#d9bd4f;
  --c7:#a9afb8; --c8:#e3a8c4 } }
* { box-sizing:border-box }
body { margin:0; background:var(--bg); color:var(--text); font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,
  "Helvetica Neue",Arial,sans-serif }
header, main, footer { max-width:1180px; margin:0 auto; padding:0 20px }
header { padding-top:26px } footer { padding-bottom:40px; color:var(--soft); font-size:13px }
h1 { font-size:25px; margin:0 0 2px; overflow-wrap:anywhere } h2 { font-size:19px; margin:38px 0 12px }
h3 { font-size:16px; margin:20px 0 8px } p { margin:6px 0 }
a { color:var(--accent) } .soft { color:var(--soft) } code, pre, .tokens { font-family:ui-monospace,SFMono-Regular,
  Menlo,Consolas,"Liberation Mono",monospace; font-size:13px }
nav ul { list-style:none; padding:0; margin:10px 0 0; display:flex; flex-wrap:wrap; gap:4px 16px; font-size:14px }
.skip { position:absolute; left:-9999px } .skip:focus { left:20px; top:8px; background:var(--card); padding:6px 10px }
.tiles { display:grid; grid-template-columns:repeat(auto-fit,minmax(150px,1fr)); gap:10px; margin:18px 0 0; padding:0 }
.tiles div { background:var(--card); border:1px solid var(--line); border-radius:8px; padding:9px 12px }
.tiles dt { color:var(--soft); font-size:13px } .tiles dd { margin:0; font-size:19px; font-weight:600;
  font-variant-numeric:tabular-nums; overflow-wrap:anywhere }
.findings { list-style:none; margin:0; padding:0; display:grid; gap:8px }
.findings li { border-left:4px solid; border-radius:6px; padding:9px 14px }
.findings .error { border-color:var(--bad); background:var(--bad-bg) } .findings .error b { color:var(--bad) }
.findings .warning { border-color:var(--warn); background:var(--warn-bg) } .findings .warning b { color:var(--warn) }
.findings .good { border-color:var(--good); background:var(--good-bg) } .findings .good b { color:var(--good) }
.findings p { margin:2px 0 } .findings .remedy { color:var(--soft) }
.findings .error .remedy, .findings .warning .remedy { color:var(--text) }
.charts { display:grid; grid-template-columns:repeat(auto-fill,minmax(340px,1fr)); gap:14px }
figure { margin:0; background:var(--card); border:1px solid var(--line); border-radius:8px; padding:10px 12px 6px }
figure.wide { margin-bottom:14px } figcaption { display:flex; flex-wrap:wrap; gap:2px 14px; font-size:13px;
  color:var(--soft) } figcaption .name { color:var(--text); font-weight:600; font-size:14px; margin-right:auto }
.key b { color:var(--text); font-weight:600 } .swatch { display:inline-block; width:10px; height:10px;
  border-radius:2px; margin-right:5px }
svg { width:100%; height:auto; display:block } .tick { fill:var(--soft); font:11px system-ui,sans-serif }
.grid { stroke:var(--line); stroke-width:1 } .mark { stroke:var(--warn); stroke-width:1.4; stroke-dasharray:3 3 }
.line { fill:none; stroke-width:1.8; stroke-linejoin:round } .idle { fill:var(--idle) }
.idle-swatch { background:var(--idle); border:1px solid var(--line) }
"""
    + "".join(
        f".line.c{i} {{ stroke:var(--c{i}) }} .dot.c{i}, .fill.c{i} {{ fill:var(--c{i}) }}"
        f" .swatch.c{i} {{ background:var(--c{i}) }}\n"
        for i in range(NUM_COLORS)
    )
    + """
.scroll { overflow-x:auto; border:1px solid var(--line); border-radius:8px; background:var(--card) }
.scroll:focus-visible, summary:focus-visible, a:focus-visible { outline:2px solid var(--accent); outline-offset:2px }
table { border-collapse:collapse; width:100%; font-size:13.5px } caption { text-align:left; padding:8px 12px;
  color:var(--soft) } th, td { text-align:left; padding:5px 12px; border-top:1px solid var(--line); vertical-align:top;
  overflow-wrap:anywhere } thead th { border-top:0; color:var(--soft); font-weight:600; white-space:nowrap }
td.num, th.num { text-align:right; font-variant-numeric:tabular-nums; white-space:nowrap }
tbody th { font-weight:500 } details { margin:10px 0 } summary { cursor:pointer; font-weight:600; padding:4px 0 }
.step > summary { font-weight:500 } .sample { background:var(--card); border:1px solid var(--line); border-radius:8px;
  padding:10px 14px; margin:10px 0 } .sample h3 { margin:0 0 4px; font-size:14px } .tokens { white-space:pre-wrap;
  overflow-wrap:anywhere; margin:4px 0; padding:8px 10px; background:var(--bg); border-radius:6px }
.tokens i { font-style:normal; color:var(--gtext); border-radius:2px } .g1 { background:var(--g1) }
.g2 { background:var(--g2) } .g3 { background:var(--g3) } .g4 { background:var(--g4) }
:root { --g4text:#1c1e21 } @media (prefers-color-scheme: dark) { :root { --g4text:#fff } }
@media print { details { break-inside:avoid } body { background:#fff } }
"""
)
