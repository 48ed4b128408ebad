"""The version of Fairway. A test compares it with those of the packages, the agent and the changelog."""

VERSION = "0.1.0"
