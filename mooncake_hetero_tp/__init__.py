"""KV handover between vLLM engines of unlike tensor-parallel size, block size and layout, over Mooncake.

Importing this package imports nothing else. vLLM loads `mooncake_hetero_tp.connector`; start reading there.
"""

__version__ = "0.1.0"
