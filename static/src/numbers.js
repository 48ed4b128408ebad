// Numbers of runs as texts, as `metric_value` of portal/web/display/formatting.py writes them.

const SPECIAL = { NaN: "NaN", Infinity: "∞", "-Infinity": "-∞" }; // JSON has no such numbers: they are sent as strings

export const isFinite = (value) => typeof value === "number" && Number.isFinite(value);

export function metricText(value) {
  if (value === null || value === undefined) return "none";
  if (value in SPECIAL) return SPECIAL[value];
  const size = Math.abs(value);
  if (size && (size < 1e-4 || size >= 1e12)) {
    const [mantissa, exponent] = value.toExponential(3).split("e");
    return `${Number(mantissa)}e${exponent}`;
  }
  if (Number.isInteger(value) || size >= 1000) return Math.round(value + 0).toLocaleString("en"); // -0 is 0
  return Number(value.toPrecision(4)).toString();
}
