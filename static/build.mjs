// Builds static/src into static/dist: one stylesheet, one module with lazy chunks, the theme switch and the icons.
// Each file gets a compressed copy beside it, which WhiteNoise sends to browsers that accept it.
import { copyFile, mkdir, readFile, readdir, rm, writeFile } from "node:fs/promises";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { constants, brotliCompressSync, gzipSync } from "node:zlib";
import { build, context } from "esbuild";
import { PurgeCSS } from "purgecss";

const here = dirname(fileURLToPath(import.meta.url));
const source = join(here, "src");
const target = join(here, "dist");
const watch = process.argv.includes("--watch");

const options = {
  bundle: true,
  minify: !watch,
  sourcemap: watch ? "inline" : false,
  outdir: target,
  target: ["chrome123", "firefox120", "safari17.5"], // light-dark()
  logLevel: "warning",
};
const page = {
  ...options,
  entryPoints: [{ in: join(source, "app.js"), out: "app" }],
  format: "esm",
  splitting: true,
  chunkNames: "chunks/[name]-[hash]",
};
// Tabler has 590 KB of rules; only those for classes, elements and attributes that pages use are kept.
const usedRules = {
  name: "used-rules",
  setup(bundle) {
    bundle.onLoad({ filter: /tabler\.min\.css$/ }, async ({ path }) => {
      const content = ["templates/**/*.html", "portal/web/**/*.py", "static/src/**/*.js"].map((part) => join(here, "..", part));
      const css = [{ raw: await readFile(path, "utf8") }];
      const [{ css: contents }] = await new PurgeCSS().purge({ content, css, variables: true });
      return { contents, loader: "css", resolveDir: dirname(path) };
    });
  },
};
const look = {
  ...options,
  plugins: [usedRules],
  entryPoints: [{ in: join(source, "fairway.css"), out: "app" }],
  loader: { ".woff2": "file", ".svg": "dataurl", ".png": "dataurl" },
};
const worker = { ...options, entryPoints: [{ in: join(source, "push_worker.js"), out: "push_worker" }], format: "iife" };
const first = { ...options, entryPoints: [{ in: join(source, "theme.js"), out: "theme" }], format: "iife" };

await rm(target, { recursive: true, force: true });
await mkdir(target, { recursive: true });
await copyFile(join(source, "icons.svg"), join(target, "icons.svg"));
for (const part of [page, look, first, worker]) {
  if (watch) await (await context(part)).watch();
  else await build(part);
}
if (!watch) {
  for (const name of await readdir(target, { recursive: true })) {
    if (!/\.(css|js|svg)$/.test(name)) continue;
    const data = await readFile(join(target, name));
    await writeFile(join(target, `${name}.gz`), gzipSync(data, { level: 9 }));
    await writeFile(join(target, `${name}.br`), brotliCompressSync(data, { params: { [constants.BROTLI_PARAM_SIZE_HINT]: data.length } }));
  }
}
