"""The kernels, one family per file, each with its reference in plain torch. They know tensors, not models.

Every operation is a `torch.library` custom op (op.py): the reference is its CPU body, a Triton kernel its CUDA body,
and its backward pass a second op. So everything runs without a GPU, without Triton, and inside
`torch.compile(fullgraph=True)`. Matrix products with weights are cuBLAS's, all called in products.py. The results and
gradients of a kernel are at most twice as far from fp64 as those of plain torch in the same dtypes.
"""
