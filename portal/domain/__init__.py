"""Words that engine and portal share: states, verdict codes, knobs. Plain Python, no Django."""
