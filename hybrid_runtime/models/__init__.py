"""Declarative model specs, the mixers that execute them, and the adapters from transformers."""
