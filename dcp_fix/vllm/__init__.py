"""Everything that touches a real vLLM: which defects it has, the plugin that repairs it, two servers compared."""
