//! Requests against tensors as vLLM allocates them, and against tensors that do not fit.

use super::*;
use crate::ErrorKind;

fn tensor(name: &str, address: u64, shape: &[u64], strides: &[i64]) -> TensorFacts {
    TensorFacts {
        name: name.to_owned(),
        address,
        shape: shape.to_vec(),
        strides_bytes: strides.iter().map(|stride| stride * 2).collect(),
        item_bytes: 2,
        dtype: DType::BF16,
    }
}

fn joined(address: u64, shape: &[u64], strides: &[i64]) -> LayerTensors {
    LayerTensors::Joined(tensor("layers.0", address, shape, strides))
}

fn resolve(axes: &str, tokens: u32, tensors: &[LayerTensors]) -> Result<Resolved> {
    LayoutRequest::parse(axes, tokens)?.resolve(tensors)
}

#[test]
fn layer_compact_hnd() {
    let Resolved { layout, regions } = resolve("BHNC", 4, &[joined(4096, &[10, 2, 4, 8], &[64, 32, 8, 1])]).unwrap();
    assert_eq!(regions, [(4096, 1280)]);
    assert_eq!(layout.layers()[0].planes, [Plane { region: 0, offset: 0 }]);
    assert_eq!(
        (layout.num_blocks(), layout.num_heads(), layout.block_tokens()),
        (10, 2, 4)
    );
    assert_eq!((layout.content_bytes(), layout.block_bytes()), (16, 128));
}

#[test]
fn a_leading_two_is_two_planes() {
    let Resolved { layout, regions } =
        resolve("KBNHC", 4, &[joined(4096, &[2, 10, 4, 2, 8], &[640, 64, 16, 8, 1])]).unwrap();
    assert_eq!(regions, [(4096, 2560)]);
    assert_eq!(
        layout.layers()[0].planes[1],
        Plane {
            region: 0,
            offset: 1280
        }
    );
    assert_eq!(
        (layout.layers()[0].head_stride, layout.layers()[0].token_stride),
        (16, 32)
    );
}

#[test]
fn block_outermost_layers_share_one_region() {
    let layers: Vec<_> = (0..3)
        .map(|layer| joined(8192 + layer * 128, &[10, 2, 4, 8], &[192, 32, 8, 1]))
        .collect();
    let Resolved { layout, regions } = resolve("BHNC", 4, &layers).unwrap();
    assert_eq!(regions, [(8192, 3840)]);
    let offsets: Vec<_> = layout.layers().iter().map(|layer| layer.planes[0].offset).collect();
    assert_eq!(offsets, [0, 128, 256]);
}

#[test]
fn separate_tensors_are_separate_regions_by_address() {
    let facts = [joined(1 << 40, &[10, 8], &[8, 1]), joined(4096, &[10, 8], &[8, 1])];
    let Resolved { layout, regions } = resolve("BC", 16, &facts).unwrap();
    assert_eq!(regions, [(4096, 160), (1 << 40, 160)]);
    assert_eq!(layout.layers()[0].planes[0].region, 1);
    assert_eq!(
        (layout.token_rows(), layout.block_tokens(), layout.num_heads()),
        (1, 16, 1)
    );
}

#[test]
fn tensors_that_touch_are_one_region_but_for_a_border() {
    // Three layers one after another, the second and third in allocations of their own.
    let layers: Vec<_> = (0..3)
        .map(|layer| joined(4096 + layer * 160, &[10, 8], &[8, 1]))
        .collect();
    let request = LayoutRequest::parse("BC", 16).unwrap();
    assert_eq!(request.resolve(&layers).unwrap().regions, [(4096, 480)]);
    let apart = request.resolve_apart(&layers, &[4096, 4416]).unwrap();
    assert_eq!(apart.regions, [(4096, 320), (4416, 160)]);
    let places: Vec<_> = apart.layout.layers().iter().map(|layer| layer.planes[0]).collect();
    assert_eq!(
        places,
        [(0, 0), (0, 160), (1, 0)].map(|(region, offset)| Plane { region, offset })
    );
    // What overlaps lies in one allocation, whatever the borders say.
    let woven: Vec<_> = (0..2)
        .map(|layer| joined(4096 + layer * 16, &[10, 8], &[16, 1]))
        .collect();
    assert_eq!(
        request.resolve_apart(&woven, &[4096, 4112]).unwrap().regions,
        [(4096, 320)]
    );
}

#[test]
fn split_tensors_and_mla() {
    let split = LayerTensors::Split {
        k: tensor("layers.0.k", 4096, &[10, 2, 4, 8], &[64, 32, 8, 1]),
        v: tensor("layers.0.v", 1 << 20, &[10, 2, 4, 8], &[64, 32, 8, 1]),
    };
    let resolved = resolve("BHNC", 4, std::slice::from_ref(&split)).unwrap();
    assert_eq!((resolved.layout.num_planes(), resolved.regions.len()), (2, 2));
    assert!(resolve("KBHNC", 4, &[split]).is_err());
    let mla = resolve("BNC", 64, &[joined(4096, &[10, 64, 576], &[64 * 576, 576, 1])])
        .unwrap()
        .layout;
    assert_eq!((mla.num_heads(), mla.content_bytes(), mla.num_planes()), (1, 1152, 1));
    // One head with whatever stride a view leaves on it.
    let wild = resolve("BHNC", 64, &[joined(4096, &[10, 1, 64, 576], &[64 * 576, -7, 576, 1])])
        .unwrap()
        .layout;
    assert!(wild.differences(&mla).is_empty());
    assert_eq!(wild.fingerprint_input(), mla.fingerprint_input());
}

#[test]
fn what_does_not_fit_is_named() {
    let shape = [10, 2, 4, 8];
    let cases: [(&str, u32, LayerTensors, &str); 11] = [
        (
            "BHNC",
            16,
            joined(4096, &shape, &[64, 32, 8, 1]),
            "`4` tokens along `N` but block_tokens is `16`",
        ),
        ("BNC", 4, joined(4096, &shape, &[64, 32, 8, 1]), "is not `BNC`"),
        (
            "BHNC",
            4,
            joined(4096, &shape, &[-64, 32, 8, 1]),
            "stride `-128` along `B`",
        ),
        ("BHNC", 4, joined(4096, &shape, &[64, 0, 8, 1]), "stride `0` along `H`"),
        ("BHNC", 4, joined(4096, &shape, &[64, 8, 8, 1]), "overlaps itself"),
        ("BHNC", 4, joined(4096, &shape, &[64, 1, 8, 2]), "must be contiguous"),
        (
            "BHNC",
            4,
            joined(4096, &[0, 2, 4, 8], &[64, 32, 8, 1]),
            "empty along `B`",
        ),
        (
            "KBHC",
            4,
            joined(4096, &[3, 2, 4, 8], &[64, 32, 8, 1]),
            "`3` along `K`, must be 2",
        ),
        (
            "BHNC",
            4,
            joined(0, &shape, &[64, 32, 8, 1]),
            "can't lie at address `0`",
        ),
        ("BHNC", 4, joined(u64::MAX - 8, &shape, &[64, 32, 8, 1]), "can't lie at"),
        (
            "BHNC",
            4,
            joined(4096, &[1 << 40, 2, 4, 8], &[i64::MAX / 2, 32, 8, 1]),
            "beyond 64 bits",
        ),
    ];
    for (axes, tokens, layer, part) in cases {
        let error = resolve(axes, tokens, &[layer]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Layout);
        assert!(error.message().contains(part), "{error}");
    }
    assert!(resolve("BHNC", 0, &[]).is_err());
    assert!(resolve("BHNC", 4, &[]).is_err());
}

#[test]
fn layers_must_agree() {
    let first = joined(4096, &[10, 2, 4, 8], &[64, 32, 8, 1]);
    let mut other = tensor("layers.1", 1 << 20, &[11, 2, 4, 8], &[64, 32, 8, 1]);
    let error = resolve("BHNC", 4, &[first.clone(), LayerTensors::Joined(other.clone())]).unwrap_err();
    assert!(
        error
            .message()
            .contains("`layers.1` has `11` blocks, `layers.0` has `10`"),
        "{error}"
    );
    other.shape[0] = 10;
    other.dtype = DType::F16;
    let error = resolve("BHNC", 4, &[first.clone(), LayerTensors::Joined(other.clone())]).unwrap_err();
    assert!(error.message().contains("dtype `float16`"), "{error}");
    other.item_bytes = 1;
    assert!(resolve("BHNC", 4, &[first.clone(), LayerTensors::Joined(other)]).is_err());
    let error = resolve("BHNC", 4, &[first.clone(), first]).unwrap_err();
    assert!(error.hint().unwrap().contains("reuse"), "{error:?}");
}

#[test]
fn differences_name_the_fields() {
    let small = resolve("BHNC", 4, &[joined(4096, &[10, 2, 4, 8], &[64, 32, 8, 1])])
        .unwrap()
        .layout;
    let large = resolve("BHNC", 8, &[joined(4096, &[20, 2, 8, 8], &[128, 64, 8, 1])])
        .unwrap()
        .layout;
    let fields: Vec<_> = small.differences(&large).into_iter().map(|d| d.field).collect();
    assert_eq!(fields, ["block_tokens", "token_rows"]);
    assert_ne!(small.fingerprint_input(), large.fingerprint_input());
    assert!(small.describe().contains("10 blocks"));
}
