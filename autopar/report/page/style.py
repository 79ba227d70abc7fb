"""The page's look: light and dark, from a phone's width to print. Fonts are the reader's own."""

STYLE = """
.autopar{--ink:#1b1f24;--soft:#59636e;--line:#d8dee4;--back:#fff;--card:#f6f8fa;--mark:#c2410c;
--c0:#2563eb;--c1:#d97706;--c2:#0d9488;--c3:#9333ea;--c4:#64748b;--c5:#db2777;
color:var(--ink);background:var(--back);font:15px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif;
max-width:60rem;margin:0 auto;padding:1.2rem 1rem 3rem;overflow-wrap:anywhere}
@media(prefers-color-scheme:dark){.autopar{--ink:#e6edf3;--soft:#9aa5b1;--line:#30363d;--back:#0d1117;
--card:#161b22;--mark:#fb923c;--c0:#5b9bff;--c1:#e8a33d;--c2:#2dbdad;--c3:#b98bf5;--c4:#8b98a9;
--c5:#f06aa8}html{background:#0d1117}}
.autopar *{box-sizing:border-box}
.autopar h1{font-size:1.5rem;line-height:1.25;margin:0}
.autopar h2{font-size:1.1rem;margin:2.2rem 0 .3rem;padding-top:.8rem;
border-top:1px solid var(--line)}
.autopar h3{font-size:.95rem;margin:1.1rem 0 .3rem}
.autopar p{margin:.3rem 0}.autopar .note,.autopar .soft{color:var(--soft);font-size:.88rem}
.autopar .facts{display:grid;grid-template-columns:repeat(auto-fit,minmax(9.5rem,1fr));gap:.6rem;
margin:1rem 0}
.autopar .fact{background:var(--card);border:1px solid var(--line);border-radius:8px;
padding:.5rem .75rem}
.autopar .fact b{display:block;font-size:1.3rem;line-height:1.3;font-variant-numeric:tabular-nums}
.autopar .fact span{color:var(--soft);font-size:.82rem;display:block}
.autopar .bar{display:flex;height:1.7rem;border-radius:5px;overflow:hidden;background:var(--card);
margin:.5rem 0;box-shadow:inset 0 0 0 1px var(--line)}
.autopar .bar i{display:block;min-width:1px}
.autopar ul{list-style:none;padding:0;margin:.4rem 0}
.autopar .legend{columns:2 17rem;column-gap:2rem}
.autopar .legend li{display:flex;gap:.5rem;break-inside:avoid;font-variant-numeric:tabular-nums}
.autopar .legend li span{flex:1}.autopar .legend em{font-style:normal;color:var(--soft);
min-width:4.2em;text-align:right}
.autopar .key{flex:none;width:.8rem;height:.8rem;border-radius:3px;margin-top:.35rem;
display:inline-block}
.autopar .c0{background:var(--c0);fill:var(--c0)}.autopar .c1{background:var(--c1);fill:var(--c1)}
.autopar .c2{background:var(--c2);fill:var(--c2)}.autopar .c3{background:var(--c3);fill:var(--c3)}
.autopar .c4{background:var(--c4);fill:var(--c4)}.autopar .c5{background:var(--c5);fill:var(--c5)}
.autopar .row{display:grid;grid-template-columns:7rem 1fr 15rem;gap:.1rem .8rem;align-items:center;
margin:.25rem 0}
.autopar .track{position:relative;height:1.3rem;background:var(--card);border-radius:4px;
box-shadow:inset 0 0 0 1px var(--line)}
.autopar .track i{position:absolute;top:0;bottom:0;border-radius:4px}
.autopar .track u{position:absolute;top:-3px;bottom:-3px;border-left:2px solid var(--mark)}
.autopar svg{display:block;width:100%;background:var(--card);border-radius:4px}
.autopar .lane{height:1.5rem}.autopar .curve{height:3.2rem;margin-top:3px}
.autopar .tall{height:9rem}
.autopar .curve path,.autopar .tall path{fill:var(--c0);fill-opacity:.25;stroke:var(--c0);
stroke-width:1.5;vector-effect:non-scaling-stroke}
.autopar svg .limit{stroke:var(--mark);stroke-width:1.5;stroke-dasharray:5 4;
vector-effect:non-scaling-stroke}
.autopar .plot{position:relative;height:17rem;margin:.6rem 0 .2rem;background:var(--card);
border-radius:6px;box-shadow:inset 0 0 0 1px var(--line)}
.autopar .plot svg{position:absolute;inset:0;height:100%;background:none}
.autopar .plot svg path{fill:none;stroke:var(--c4);stroke-width:1.5;
vector-effect:non-scaling-stroke}
.autopar .dot{position:absolute;width:1.35rem;height:1.35rem;margin:-.68rem 0 0 -.68rem;
border-radius:50%;color:#fff;font-size:.74rem;line-height:1.35rem;text-align:center}
.autopar .best{outline:3px solid var(--mark);outline-offset:1px;z-index:1}
.autopar .at{position:absolute;font-size:.78rem;color:var(--soft);white-space:nowrap}
.autopar .ends{display:flex;justify-content:space-between;font-size:.78rem;color:var(--soft)}
.autopar .wide{overflow-x:auto}
.autopar table{border-collapse:collapse;width:100%;font-size:.88rem;margin:.4rem 0}
.autopar th{text-align:left;color:var(--soft);font-weight:600}
.autopar th,.autopar td{padding:.25rem .9rem .25rem 0;border-bottom:1px solid var(--line);
vertical-align:top;overflow-wrap:break-word}
.autopar .n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
.autopar td .soft{font-size:inherit}
.autopar code{font:.86em ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
.autopar details{margin-left:.15rem;border-left:1px solid var(--line);padding-left:.8rem}
.autopar summary{cursor:pointer;padding:.1rem 0}
.autopar .leaf{display:grid;grid-template-columns:minmax(9rem,2fr) minmax(7rem,2fr) 3fr;gap:0 1rem;
padding:.1rem 0 .1rem 1.1rem;font-size:.88rem}
.autopar .split{color:var(--c0)}
@media(max-width:44rem){.autopar .row{grid-template-columns:5.2rem 1fr}
.autopar .row>:nth-child(3){grid-column:2}.autopar .leaf{grid-template-columns:1fr;
padding-bottom:.4rem}.autopar table{font-size:.78rem}
.autopar th,.autopar td{padding-right:.4rem}.autopar th:last-child,.autopar td:last-child
{padding-right:0}.autopar td code{overflow-wrap:anywhere}}
@media print{.autopar{max-width:none;padding:0;font-size:10pt;print-color-adjust:exact;
-webkit-print-color-adjust:exact;--ink:#000;--soft:#444;--line:#bbb;--back:#fff;--card:#f4f4f4}
.autopar details::details-content{content-visibility:visible;block-size:auto}
.autopar .row,.autopar .plot,.autopar tr,.autopar .leaf{break-inside:avoid}
.autopar h2{break-after:avoid}.autopar .wide{overflow:visible}}
"""
