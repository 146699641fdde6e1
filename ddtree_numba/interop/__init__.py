"""Bridges to the arrays of real engines: one module for each, NumPy reference, kernel and launcher side by side.

`visibility` and `ragged_mask` are the general formats (dense masks; flat and packed ones), `sglang`, `tensorrt_llm`,
`vllm`, `flashinfer` and `flashmla` what those engines call their arrays. `torch_ops`, which needs PyTorch, has the
stages as operators for `torch.compile`. Device arrays are converted on the device: nothing is copied to the host.
"""
