//! Codes and bytes that peers of other releases rely on.

use pdkv_core::dtype::DType;
use pdkv_core::hex;
use pdkv_core::plan::WireOrder;
use pdkv_core::shard::Shard;

use crate::caches::{Cache, Counts, Placement};

#[test]
fn fingerprint_inputs_are_as_released() {
    let counts = Counts {
        layers: 3,
        planes: 2,
        heads: 2,
        tokens: 4,
        content: 8,
    };
    let cache = Cache::new(&counts, &Placement::dense(5, [0, 1, 2, 3, 4]));
    let mut expected = hex::encode(b"pdkv-layout-1");
    // dtype, layers, heads, block tokens, token rows, content bytes, planes
    for value in ["02", "03", "02", "04", "04", "10", "02"] {
        expected.push_str(value);
        expected.push_str("00000000000000");
    }
    assert_eq!(hex::encode(&cache.resolved.layout.fingerprint_input()), expected);
    let elsewhere = Cache::new(&counts, &Placement::dense(9, [2, 0, 1, 4, 3]));
    assert_eq!(hex::encode(&elsewhere.resolved.layout.fingerprint_input()), expected);
    let shard = hex::encode(&Shard::whole(3, 2).fingerprint_input());
    assert_eq!(
        shard,
        hex::encode(b"pdkv-shard-1") + "000000000300000003000000000000000200000002000000"
    );
}

#[test]
fn wire_codes_are_as_released() {
    assert_eq!(WireOrder::LAYER_MAJOR.code(), 0o43210);
    assert_eq!(WireOrder::BLOCK_MAJOR.code(), 0o43102);
    let codes: Vec<_> = DType::ALL.iter().map(|dtype| (dtype.code(), dtype.as_str())).collect();
    let released = [
        (0, "raw"),
        (1, "float16"),
        (2, "bfloat16"),
        (3, "float32"),
        (4, "float64"),
        (5, "float8_e4m3fn"),
        (6, "float8_e5m2"),
        (7, "float8_e4m3fnuz"),
        (8, "float8_e5m2fnuz"),
        (9, "uint8"),
        (10, "int8"),
        (11, "int16"),
        (12, "int32"),
        (13, "int64"),
        (14, "uint16"),
        (15, "uint32"),
        (16, "uint64"),
        (17, "bool"),
    ];
    assert_eq!(codes, released);
}
