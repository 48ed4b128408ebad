"""Failures of CUDA, its libraries and GPUs."""

from __future__ import annotations

from portal.domain.jobs.failure_rules import CERTAIN, GENERAL, SPECIFIC, Evidence, FailureAction, FailureRule
from portal.domain.jobs.reasons import EndReason

CUDA_RULES = (
    FailureRule(
        code="cuda_out_of_memory",
        title="CUDA out of memory",
        cause="A tensor did not fit into the free memory of the GPU.",
        fix="Reduce the batch size and accumulate gradients, enable activation checkpointing or mixed precision, "
        "or "
        "request a GPU with more memory.",
        pattern=r"CUDA out of memory|CUDA error: out of memory|CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation",
    ),
    FailureRule(
        code="cuda_illegal_memory_access",
        title="CUDA illegal memory access",
        cause="A CUDA kernel read or wrote an address outside its buffers; usually a bug in a custom kernel or "
        "extension.",
        fix="Run with CUDA_LAUNCH_BLOCKING=1 to find the kernel, and match extension builds to the installed "
        "PyTorch.",
        pattern=r"an illegal memory access was encountered|CUDA_ERROR_ILLEGAL_ADDRESS|cudaErrorIllegalAddress",
    ),
    FailureRule(
        code="cuda_device_side_assert",
        title="CUDA device-side assert",
        cause="A check inside a CUDA kernel failed, most often a label or an index outside its range.",
        fix="Check that labels are below the number of classes and indexes below the size of the embedding. The "
        "same "
        "step on the CPU names the line.",
        evidence=Evidence.CAUSE,
        pattern=r"device-side assert triggered|\.cu:\d+: .*Assertion .* failed",
    ),
    FailureRule(
        code="cuda_no_kernel_image",
        title="No CUDA kernel for this GPU",
        cause="The framework or an extension was not compiled for the compute capability of this GPU.",
        fix="Use an image with a framework that supports the GPU, or set TORCH_CUDA_ARCH_LIST when you build "
        "extensions.",
        pattern=r"no kernel image is available for execution on the device|CUDA_ERROR_NO_BINARY_FOR_GPU",
    ),
    FailureRule(
        code="cuda_driver_too_old",
        title="The NVIDIA driver is too old",
        cause="The image requires a newer CUDA driver than the node has.",
        fix="Use an environment with an older CUDA version, or exclude this node; an administrator can upgrade its "
        "driver.",
        action=FailureAction.EXCLUDE_NODE,
        evidence=Evidence.CAUSE,
        pattern=r"The NVIDIA driver on your system is too old|CUDA driver version is insufficient for CUDA runtime"
        r"|nvidia-container-cli: requirement error: unsatisfied condition: cuda",
    ),
    FailureRule(
        code="cuda_forward_compatibility",
        title="CUDA forward compatibility is not supported here",
        cause="The image brings its own CUDA driver library, which this GPU or driver does not support.",
        fix="Use an image whose CUDA version the node's driver supports, or remove the cuda-compat package from "
        "it.",
        evidence=Evidence.CAUSE,
        pattern=r"forward compatibility was attempted on non supported HW|CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE"
        r"|CUDA_ERROR_SYSTEM_DRIVER_MISMATCH",
    ),
    FailureRule(
        code="cuda_unsupported_ptx",
        title="PTX of a newer CUDA toolkit",
        cause="A kernel was compiled by a newer CUDA toolkit than the driver supports.",
        fix="Build the extension with the CUDA version of the driver or an older one.",
        pattern=r"provided PTX was compiled with an unsupported toolchain|CUDA_ERROR_UNSUPPORTED_PTX_VERSION",
    ),
    FailureRule(
        code="cuda_no_device",
        title="The program found no GPU",
        cause="The task has no GPU, or the program cannot use the GPU of its node.",
        fix="Request at least one GPU. If the job has one, exclude the node and report it to an administrator.",
        action=FailureAction.EXCLUDE_NODE,
        evidence=Evidence.CAUSE,
        pattern=r"No CUDA GPUs are available|no CUDA-capable device is detected|CUDA_ERROR_NO_DEVICE",
    ),
    FailureRule(
        code="cuda_invalid_device",
        title="GPU index out of range",
        cause="The program selected a GPU index that its task does not have; indexes begin at 0 in each task.",
        fix="Use LOCAL_RANK as the index, or request as many GPUs for each task as processes use.",
        pattern=r"CUDA error: invalid device ordinal|CUDA_ERROR_INVALID_DEVICE\b|cudaErrorInvalidDevice\b",
    ),
    FailureRule(
        code="cuda_device_busy",
        title="The GPU is busy or not available",
        cause="Another process has the GPU in exclusive mode, or its driver is in a state that accepts no program.",
        fix="Start one process for each GPU. If only this task uses it, start it again without this node.",
        action=FailureAction.EXCLUDE_NODE,
        evidence=Evidence.CAUSE,
        pattern=r"all CUDA-capable devices are busy or unavailable|cudaErrorDevicesUnavailable",
    ),
    FailureRule(
        code="cuda_visible_devices",
        title="CUDA_VISIBLE_DEVICES does not match the task",
        cause="The program or its script sets or expects other GPUs than those of its task.",
        fix="Do not set CUDA_VISIBLE_DEVICES: Fairway sets it. Number the GPUs of a task from 0.",
        priority=SPECIFIC,
        pattern=r"Invalid CUDA 'device=|os\.environ\['CUDA_VISIBLE_DEVICES'\]: |[Ii]nvalid (value"
        r"|device).* in CUDA_VISIBLE_DEVICES",
    ),
    FailureRule(
        code="cuda_ecc_error",
        title="Uncorrectable ECC error of the GPU",
        cause="The memory of the GPU is faulty.",
        fix="Start it again without this node. Administrators see the GPU on the page of alerts.",
        action=FailureAction.EXCLUDE_NODE,
        priority=SPECIFIC,
        pattern=r"uncorrectable ECC error encountered|CUDA_ERROR_ECC_UNCORRECTABLE|cudaErrorECCUncorrectable",
    ),
    FailureRule(
        code="cuda_launch_failure",
        title="CUDA unspecified launch failure",
        cause="A CUDA kernel failed on the GPU: a bug of the kernel, or faulty hardware.",
        fix="Run with CUDA_LAUNCH_BLOCKING=1 to find the kernel. If it fails only on this node, exclude the node.",
        action=FailureAction.EXCLUDE_NODE,
        pattern=r"unspecified launch failure|CUDA_ERROR_LAUNCH_FAILED|cudaErrorLaunchFailure",
    ),
    FailureRule(
        code="cuda_misaligned_address",
        title="CUDA misaligned address",
        cause="A CUDA kernel accessed memory that is not aligned to the size of its type.",
        fix="Update or rebuild the extension that owns the kernel; contiguous tensors often avoid it.",
        pattern=r"CUDA error: misaligned address|CUDA_ERROR_MISALIGNED_ADDRESS",
    ),
    FailureRule(
        code="cuda_illegal_instruction",
        title="CUDA illegal instruction",
        cause="A kernel contains an instruction that this GPU does not have, or its code is damaged.",
        fix="Rebuild extensions for this GPU. If it fails only on this node, exclude the node.",
        pattern=r"an illegal instruction was encountered|CUDA_ERROR_ILLEGAL_INSTRUCTION|hardware stack error",
    ),
    FailureRule(
        code="cuda_unknown_error",
        title="CUDA could not be initialized",
        cause="The driver of the node returned an unknown error.",
        fix="Start it again without this node, and report the node to an administrator.",
        action=FailureAction.EXCLUDE_NODE,
        evidence=Evidence.CAUSE,
        pattern=r"CUDA error: unknown error|CUDA unknown error - this may be due to|CUDA_ERROR_UNKNOWN",
    ),
    FailureRule(
        code="cuda_fabric_not_ready",
        title="The NVLink fabric of the node is not ready",
        cause="The fabric manager of the node does not run, so its NVSwitch GPUs cannot be used.",
        fix="Start it again without this node, and report the node to an administrator.",
        action=FailureAction.EXCLUDE_NODE,
        priority=SPECIFIC,
        evidence=Evidence.CAUSE,
        pattern=r"CUDA_ERROR_SYSTEM_NOT_READY|[Ss]ystem not yet initialized|Error 802: ",
    ),
    FailureRule(
        code="torch_without_cuda",
        title="PyTorch without CUDA",
        cause="The environment has the CPU build of PyTorch.",
        fix="Use an environment with the CUDA build of PyTorch, and check that pip does not replace it.",
        pattern=r"Torch not compiled with CUDA enabled",
    ),
    FailureRule(
        code="torch_load_without_gpu",
        title="A checkpoint of a GPU was loaded without one",
        cause="torch.load restores tensors to the GPU that saved them, and the task has no such GPU.",
        fix="Pass map_location to torch.load, or request a GPU.",
        pattern=r"Attempting to deserialize object on (a )?CUDA device",
    ),
    FailureRule(
        code="cuda_fork",
        title="CUDA was used before a fork",
        cause="A worker process was forked after the program had used CUDA.",
        fix='Use multiprocessing_context="spawn" for the data loader, and use CUDA only in the main process.',
        pattern=r"Cannot re-initialize CUDA in forked subprocess",
    ),
    FailureRule(
        code="cublas_not_initialized",
        title="cuBLAS could not be initialized",
        cause="cuBLAS found too little GPU memory for its workspace, or an index was out of range before.",
        fix="Reduce the batch size, and check labels and indexes with the same step on the CPU.",
        pattern=r"CUBLAS_STATUS_(NOT_INITIALIZED|ALLOC_FAILED)",
    ),
    FailureRule(
        code="cublas_execution_failed",
        title="cuBLAS operation failed",
        cause="A matrix multiplication failed on the GPU, often after wrong shapes, types or an earlier CUDA "
        "error.",
        fix="Run with CUDA_LAUNCH_BLOCKING=1. Check that PyTorch loads the cuBLAS that it was built with.",
        pattern=r"CUBLAS_STATUS_(EXECUTION_FAILED|INTERNAL_ERROR|INVALID_VALUE|NOT_SUPPORTED|ARCH_MISMATCH)",
    ),
    FailureRule(
        code="cudnn_not_initialized",
        title="cuDNN could not be initialized",
        cause="cuDNN found too little GPU memory, or does not match the driver.",
        fix="Reduce the batch size. If it fails at the first step, use an image for the driver of the node.",
        pattern=r"CUDNN_STATUS_(NOT_INITIALIZED|ALLOC_FAILED)|DNN library (initialization failed|is not found)",
    ),
    FailureRule(
        code="cudnn_execution_failed",
        title="cuDNN operation failed",
        cause="A convolution or another cuDNN operation failed on the GPU.",
        fix="Reduce the batch size, or set torch.backends.cudnn.enabled = False once to see the actual error.",
        pattern=r"CUDNN_STATUS_(EXECUTION_FAILED|INTERNAL_ERROR|MAPPING_ERROR|NOT_SUPPORTED|BAD_PARAM)",
    ),
    FailureRule(
        code="cudnn_version_mismatch",
        title="cuDNN versions do not match",
        cause="The program loads another cuDNN than its framework was built with.",
        fix="Remove cuDNN paths from LD_LIBRARY_PATH, and install the cuDNN package that the framework requires.",
        priority=SPECIFIC,
        evidence=Evidence.CAUSE,
        pattern=r"cuDNN version incompatibility|Loaded runtime CuDNN library: \S+ but source was compiled with"
        r"|Could not load library libcudnn|Unable to load any of \{libcudnn",
    ),
    FailureRule(
        code="cudnn_frontend",
        title="cuDNN has no kernel for the operation",
        cause="cuDNN found no way to run an operation, such as attention, on this GPU with these shapes and types.",
        fix="Update PyTorch and cuDNN together, choose another attention with torch.nn.attention.sdpa_kernel, or "
        "use a "
        "newer GPU.",
        priority=SPECIFIC,
        pattern=r"cuDNN Frontend error|\[cudnn_frontend\] Error|cudnnGraphNotSupportedError"
        r"|No (valid )?execution plans? (support|built|found)",
    ),
    FailureRule(
        code="triton_out_of_resources",
        title="A Triton kernel needs more than the GPU has",
        cause="A kernel asks for more shared memory or registers than a multiprocessor of this GPU has.",
        fix="Reduce block sizes or num_stages of the kernel, or use a GPU for which it was tuned.",
        priority=SPECIFIC,
        pattern=r"OutOfResources\b|out of resource: (shared memory|tensor memory|threads|registers)",
    ),
    FailureRule(
        code="gpu_capability",
        title="The GPU is too old for this function",
        cause="The program uses a function, such as bfloat16 or FlashAttention, that this GPU does not have.",
        fix="Use float16 or another attention, or request a newer GPU model.",
        priority=SPECIFIC,
        pattern=r"only supports? Ampere GPUs or newer|only supported on (GPUs"
        r"|NVIDIA GPUs) with (CUDA )?compute capability"
        r"|requires (a )?(GPU|device) with (CUDA )?compute capability|Your setup doesn't support bf16",
    ),
    FailureRule(
        code="driver_not_reachable",
        title="The NVIDIA driver did not answer",
        cause="The task has no GPU, or the driver of the node is not loaded or was updated while the node was "
        "running.",
        fix="Request at least one GPU. If the job has one, start it again without this node, and report the node "
        "to an "
        "administrator.",
        action=FailureAction.EXCLUDE_NODE,
        priority=SPECIFIC,
        evidence=Evidence.CAUSE,
        pattern=r"couldn't communicate with the NVIDIA driver|Failed to initialize NVML"
        r"|Driver/library version mismatch"
        r"|Found no NVIDIA driver on your system|NVMLError_(DriverNotLoaded|LibRmVersionMismatch|LibraryNotFound)"
        r"|NVML_ERROR_DRIVER_NOT_LOADED|NVML Shared Library Not Found|nvml error: driver not loaded",
    ),
    FailureRule(
        code="lightning_no_gpu",
        title="Lightning found no GPU, or too few",
        cause="The Trainer asks for GPUs that PyTorch does not see: the task has fewer, or PyTorch has no CUDA.",
        fix="Request as many GPUs for each task as devices says, and use an environment with the CUDA build of "
        "PyTorch.",
        priority=SPECIFIC,
        pattern=r"No supported gpu backend found|Accelerator` can not run on your system"
        r"|You requested (gpu|GPUs?): \[|But your machine only has: \[",
    ),
    FailureRule(
        code="bitsandbytes_setup",
        title="bitsandbytes does not find CUDA",
        cause="bitsandbytes has no library for the CUDA version of the environment, or finds no CUDA.",
        fix="Update bitsandbytes, and use an image whose CUDA version it supports. python -m bitsandbytes shows "
        "what it "
        "finds.",
        priority=SPECIFIC,
        pattern=r"CUDA Setup failed despite (GPU|CUDA) being available|libbitsandbytes_cuda\w+\.so: cannot open"
        r"|bitsandbytes library .*(compiled|loaded) without (CUDA|GPU) support",
    ),
    FailureRule(
        code="nvcc_unsupported_gpu",
        title="nvcc does not support the requested GPU",
        cause="An extension was built for a compute capability that the CUDA toolkit does not know.",
        fix="Set TORCH_CUDA_ARCH_LIST to what the toolkit supports, or use an image with a newer toolkit.",
        priority=SPECIFIC,
        evidence=Evidence.CAUSE,
        pattern=r"nvcc fatal +: Unsupported gpu architecture",
    ),
)

XID_RULES = (
    FailureRule(
        code="xid_gpu_off_bus",
        title="The GPU has fallen off the bus (XID 79)",
        cause="The node lost contact with its GPU: faulty hardware, power or cooling.",
        fix="Start it again without this node. Administrators see the GPU on the page of alerts.",
        action=FailureAction.EXCLUDE_NODE,
        priority=CERTAIN,
        pattern=r"Xid \(PCI:[^)]*\): 79\b|XID 79 on GPU|GPU has fallen off the bus",
    ),
    FailureRule(
        code="xid_memory_error",
        title="GPU memory error (XID 48, 63, 64, 94, 95 or 140)",
        cause="The memory of the GPU had an error that could not be corrected.",
        fix="Start it again without this node. Administrators see the GPU on the page of alerts.",
        action=FailureAction.EXCLUDE_NODE,
        priority=CERTAIN,
        pattern=r"Xid \(PCI:[^)]*\): (48|63|64|94|95|140)\b|XID (48|63|64|94|95|140) on GPU",
    ),
    FailureRule(
        code="xid_nvlink_error",
        title="NVLink error (XID 74, 136 or 155)",
        cause="A link between GPUs of the node failed.",
        fix="Start it again without this node. Administrators see the GPU on the page of alerts.",
        action=FailureAction.EXCLUDE_NODE,
        priority=CERTAIN,
        pattern=r"Xid \(PCI:[^)]*\): (74|136|155)\b|XID (74|136|155) on GPU",
    ),
    FailureRule(
        code="xid_gpu_firmware",
        title="The firmware of the GPU did not respond (XID 62, 109, 119, 120 or 143)",
        cause="The GPU System Processor or another controller of the GPU stopped.",
        fix="Start it again without this node; the GPU needs a reset or the node a restart.",
        action=FailureAction.EXCLUDE_NODE,
        priority=CERTAIN,
        pattern=r"Xid \(PCI:[^)]*\): (62|109|119|120|143)\b|XID (62|109|119|120|143) on GPU",
    ),
    FailureRule(
        code="xid_page_fault",
        title="GPU page fault or exception (XID 13, 31 or 43)",
        cause="A kernel of the program accessed invalid memory, or raised an exception on the GPU.",
        fix="Run with CUDA_LAUNCH_BLOCKING=1 or compute-sanitizer to find the kernel.",
        priority=GENERAL,  # CUDA's own message in the log says which of them it was
        evidence=Evidence.CAUSE,
        pattern=r"Xid \(PCI:[^)]*\): (13|31|43)\b|XID (13|31|43) on GPU",
    ),
    FailureRule(
        code="gpu_lost_in_driver",
        title="The driver lost the GPU",
        cause="NVML and CUDA cannot reach the GPU any more.",
        fix="Start it again without this node, and report the node to an administrator.",
        action=FailureAction.EXCLUDE_NODE,
        priority=SPECIFIC,
        evidence=Evidence.CAUSE,
        pattern=r"GPU is lost\. +Reboot|Unable to determine the device handle for (gpu|GPU)",
    ),
    FailureRule(
        code="gpu_lost",
        title="A GPU of the job failed",
        cause="The agent of the node reported that a GPU of the job is lost, and ended the task.",
        fix="Start it again without this node. Administrators see the GPU on the page of alerts.",
        action=FailureAction.EXCLUDE_NODE,
        reasons=(EndReason.GPU_LOST,),
        priority=SPECIFIC,
    ),
)
