"""Which golden vectors of the tests of codecs go through rule files: all that a codec decodes."""

from __future__ import annotations

import test_bnb
import test_fp8
import test_fp8_block
import test_gguf
import test_gptq_awq
import test_int8
import test_int_pack
import test_microscaling
import test_nvfp4
from kit_layouts import goldens

# what the tests named `…_decode_through_a_rule_file` and `a_rule_decodes_every_golden…` go through
DECODED = (
    test_bnb.NAMES, test_fp8.KINDS, test_fp8_block.KINDS,
    [f"gguf_{kind}" for kind in test_gguf.DECODED], test_gptq_awq.KINDS, test_int8.KINDS,
    test_int_pack.KINDS, test_microscaling.KINDS, test_nvfp4.KINDS,
)  # fmt: skip
# in a test of its own: AutoAWQ's numbers are not what it stored
ALONE = {"awq_gemv_g128"}
# numbers that were rounded and have no parts; words whose order is that of a device, which are
# named and refused
NOT_DECODED = {"microxcaling_fake", "ao_int4_tinygemm"}


def test_every_golden_that_has_a_codec_is_decoded_through_a_rule_file() -> None:
    found = {kind.split()[0] for kinds in DECODED for kind in kinds} | ALONE
    assert found >= set(goldens()) - NOT_DECODED
    assert not found & NOT_DECODED
