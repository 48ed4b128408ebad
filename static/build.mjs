// Builds static/src into static/dist: one stylesheet, one module with lazy chunks, the theme switch and the icons.
import { copyFile, mkdir, rm } from "node:fs/promises";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { build, context } from "esbuild";

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
const look = {
  ...options,
  entryPoints: [{ in: join(source, "fairway.css"), out: "app" }],
  loader: { ".woff2": "file", ".svg": "dataurl", ".png": "dataurl" },
};
const first = { ...options, entryPoints: [{ in: join(source, "theme.js"), out: "theme" }], format: "iife" };

await rm(target, { recursive: true, force: true });
await mkdir(target, { recursive: true });
await copyFile(join(source, "icons.svg"), join(target, "icons.svg"));
for (const part of [page, look, first]) {
  if (watch) await (await context(part)).watch();
  else await build(part);
}
