"""Definitions shared by scheduler and portal: states, reasons, policy settings. Plain Python, no Django."""
