//! Frames of a pipe: fixed bytes, round trips, and what no end of a pipe would send. Strided tensors against a naive walk.

use pdkv_core::ErrorKind;
use pdkv_core::hex;
use pdkv_core::id::RegionId;
use pdkv_core::pipe::{
    HEADER, INLINE_MAX, ItemHead, MAX_CHANNEL, MAX_DIMS, MAX_FRAME, MAX_TAG, MAX_TEXT, Strided, TensorHead, ToReceiver,
    ToSender,
};
use proptest::prelude::*;

fn down(frame: &ToReceiver<'_>) -> Vec<u8> {
    let mut out = Vec::new();
    frame.encode(&mut out).expect("within the caps");
    out
}

fn up(frame: &ToSender<'_>) -> Vec<u8> {
    let mut out = Vec::new();
    frame.encode(&mut out);
    out
}

fn item<'a>(seq: u64, tag: &'a [u8], tensor: Option<TensorHead<'a>>, inline: Option<&'a [u8]>) -> ToReceiver<'a> {
    let head = ItemHead { seq, tag, tensor };
    ToReceiver::Item { head, inline }
}

#[test]
fn what_the_sender_says_has_these_bytes() {
    let small = TensorHead::new("bfloat16", &[1, 3], 2).expect("a tensor");
    let large = TensorHead::new("uint8", &[70_000], 1).expect("a tensor");
    let cases = [
        (
            ToReceiver::Open { channel: b"kv" },
            "504b44500100000002000000000000006b76",
        ),
        (
            item(7, b"t", Some(small), Some(&[1, 2, 3, 4, 5, 6])),
            "504b445002000000370000000000000007000000000000000600000000000000010000000802030001000000000000000300000000\
             00000062666c6f6174313674010203040506",
        ),
        (
            item(8, b"", Some(large), None),
            "504b4450020000002500000000000000080000000000000070110100000000000000000005010100701101000000000075696e7438",
        ),
        (
            item(9, b"none", None, None),
            "504b4450020000001c0000000000000009000000000000000000000000000000040000000000000\
             06e6f6e65",
        ),
        (
            ToReceiver::Placed { seq: 8 },
            "504b44500300000008000000000000000800000000000000",
        ),
        (
            ToReceiver::Failed {
                kind: ErrorKind::Unsupported,
                reason: "no way",
            },
            "504b4450040000000e0000000000000003000000000000006e6f20776179",
        ),
        (
            ToReceiver::Bye { items: 10 },
            "504b44500500000008000000000000000a00000000000000",
        ),
    ];
    for (frame, bytes) in cases {
        let raw = down(&frame);
        assert_eq!(hex::encode(&raw), bytes.replace(' ', ""), "{}", frame.name());
        assert_eq!(ToReceiver::decode(&raw).expect("ours"), Some((frame, raw.len())));
    }
}

#[test]
fn what_the_receiver_says_has_these_bytes() {
    let place = ToSender::Place {
        seq: 8,
        region: RegionId(5),
        offset: 4096,
    };
    let refused = ToSender::Refused {
        kind: ErrorKind::Capacity,
        reason: "full",
    };
    let cases = [
        (
            place,
            "504b445011000000180000000000000008000000000000000500000000000000001000000000000\
                 0",
        ),
        (
            ToSender::Received { items: 3 },
            "504b44501200000008000000000000000300000000000000",
        ),
        (refused, "504b4450130000000c00000000000000050000000000000066756c6c"),
        (
            ToSender::Gone { items: 4 },
            "504b44501400000008000000000000000400000000000000",
        ),
    ];
    for (frame, bytes) in cases {
        let raw = up(&frame);
        assert_eq!(hex::encode(&raw), bytes.replace(' ', ""), "{}", frame.name());
        assert_eq!(ToSender::decode(&raw).expect("ours"), Some((frame, raw.len())));
    }
}

#[test]
fn the_largest_item_fits_a_frame_and_larger_ones_are_refused() {
    let (tag, bytes, shape) = (vec![1; MAX_TAG], vec![2; INLINE_MAX], [1; MAX_DIMS - 1]);
    let shape: Vec<u64> = shape.into_iter().chain([INLINE_MAX as u64]).collect();
    let tensor = TensorHead::new("float8_e4m3fnuz_9_letter", &shape, 1).expect("a tensor");
    let raw = down(&item(0, &tag, Some(tensor), Some(&bytes)));
    assert_eq!(raw.len(), MAX_FRAME);
    assert!(ToReceiver::decode(&raw).expect("ours").is_some());

    let long = vec![0; MAX_TAG + 1];
    let mut out = vec![9];
    let refused = item(0, &long, None, None).encode(&mut out).expect_err("too long");
    assert_eq!((refused.kind(), out.as_slice()), (ErrorKind::Capacity, &[9][..]));
    let channel = vec![0; MAX_CHANNEL + 1];
    let refused = ToReceiver::Open { channel: &channel }
        .encode(&mut out)
        .expect_err("too long");
    assert_eq!(refused.kind(), ErrorKind::Capacity);
    for (dtype, shape, itemsize) in [
        ("Float", &[1][..], 4),
        ("", &[1], 4),
        ("a_name_of_25_letters_is_no", &[1], 4),
        ("int8", &[1; MAX_DIMS + 1], 1),
        ("int8", &[1 << 40, 1 << 40], 1),
        ("int64", &[1 << 46], 8),
    ] {
        let refused = TensorHead::new(dtype, shape, itemsize).expect_err("refused");
        assert_eq!(refused.kind(), ErrorKind::Layout, "{dtype} {shape:?}");
    }
    let empty = TensorHead::new("int64", &[u64::MAX, 0, u64::MAX], 8).expect("has no element");
    assert_eq!(empty.nbytes, 0);
}

#[test]
fn a_reason_is_cut_between_characters() {
    let long = "ß".repeat(MAX_TEXT);
    let raw = down(&ToReceiver::Failed {
        kind: ErrorKind::Internal,
        reason: &long[1 - 1..],
    });
    let (frame, _) = ToReceiver::decode(&raw).expect("ours").expect("whole");
    let ToReceiver::Failed { reason, .. } = frame else {
        panic!("{frame:?}")
    };
    assert!(reason.len() <= MAX_TEXT && long.starts_with(reason));
}

#[test]
fn what_nobody_sends_is_an_error_before_the_body_is_here() {
    let good = down(&ToReceiver::Bye { items: 1 });
    let mut bad: Vec<Vec<u8>> = [0, 5, 7, 12, 15].map(|at| changed(&good, at, 0xEE)).to_vec();
    bad.push(changed(&good, 4, 99));
    bad.push(changed(&good, 8, 9));
    bad.push(changed(&good, 11, 0xFF));
    bad.push(up(&ToSender::Gone { items: 1 }));
    for raw in bad {
        let refused = ToReceiver::decode(&raw[..HEADER]).expect_err("refused");
        assert_eq!(refused.kind(), ErrorKind::Integrity);
    }
    assert!(ToSender::decode(&good).is_err(), "an echo is no answer");
}

#[test]
fn an_item_that_contradicts_itself_is_an_error() {
    let tensor = TensorHead::new("int16", &[4], 2).expect("a tensor");
    let good = down(&item(0, b"tag", Some(tensor), Some(&[7; 8])));
    let refused = |raw: &[u8]| ToReceiver::decode(raw).expect_err("refused").kind() == ErrorKind::Integrity;
    // Bytes, tag's length, dtype's, dimensions, flags, the zero, the extent, a letter of the dtype.
    for (at, byte) in [
        (24, 9),
        (32, 4),
        (36, 6),
        (37, 2),
        (38, 1),
        (38, 2),
        (38, 7),
        (39, 1),
        (40, 3),
        (48, b'I'),
    ] {
        assert!(refused(&changed(&good, at, byte)), "byte {at} as {byte}");
    }
    // An empty tensor is inline: there is nothing to place.
    let empty = TensorHead::new("int16", &[0], 2).expect("a tensor");
    assert!(refused(&down(&item(0, b"", Some(empty), None))));
    let huge = down(&item(
        0,
        b"",
        Some(TensorHead::new("int8", &[1 << 48], 1).expect("a tensor")),
        None,
    ));
    assert!(ToReceiver::decode(&huge).is_ok());
    assert!(refused(&changed(&huge, 30, 3)), "more bytes than any memory");
}

fn changed(raw: &[u8], at: usize, byte: u8) -> Vec<u8> {
    let mut raw = raw.to_vec();
    raw[at] = byte;
    raw
}

/// Number, tag, dtype with shape and item size, whether inline.
type AnyItem = (u64, Vec<u8>, Option<(String, Vec<u64>, u64)>, bool);

fn any_item() -> impl Strategy<Value = AnyItem> {
    let tensor = ("[a-z0-9_]{1,24}", prop::collection::vec(0_u64..9, 0..5), 1_u64..9);
    let tag = prop::collection::vec(any::<u8>(), 0..50);
    (any::<u64>(), tag, prop::option::of(tensor), any::<bool>())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn items_come_back_whole_and_are_waited_for((seq, tag, tensor, inline) in any_item(), cut in any::<prop::sample::Index>()) {
        let tensor = tensor.as_ref().map(|(dtype, shape, size)| TensorHead::new(dtype, shape, *size).unwrap());
        let nbytes = tensor.map_or(0, |tensor| tensor.nbytes) as usize;
        let bytes: Vec<u8> = (0..nbytes).map(|at| at as u8).collect();
        let inline = tensor.filter(|_| inline || nbytes == 0).map(|_| bytes.as_slice());
        let frame = item(seq, &tag, tensor, inline);
        let mut raw = down(&frame);
        let len = raw.len();
        prop_assert_eq!(ToReceiver::decode(&raw[..cut.index(len)]).unwrap(), None);
        raw.extend([1, 2, 3]);
        prop_assert_eq!(ToReceiver::decode(&raw).unwrap(), Some((frame, len)));
    }

    #[test]
    fn any_bytes_and_any_change_are_read_or_refused(
        junk in prop::collection::vec(any::<u8>(), 0..200),
        (seq, tag, tensor, _) in any_item(),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
    ) {
        let tensor = tensor.as_ref().map(|(dtype, shape, size)| TensorHead::new(dtype, shape, *size).unwrap());
        let bytes = vec![0; tensor.map_or(0, |tensor| tensor.nbytes) as usize];
        let mut raw = down(&item(seq, &tag, tensor, tensor.map(|_| bytes.as_slice())));
        for (at, byte) in changes {
            let at = at.index(raw.len());
            raw[at] = byte;
        }
        for input in [&junk, &raw] {
            match ToReceiver::decode(input) {
                Ok(Some((frame, used))) => prop_assert_eq!(down(&frame), &input[..used]),
                Ok(None) => {}
                Err(error) => prop_assert_eq!(error.kind(), ErrorKind::Integrity),
            }
            match ToSender::decode(input) {
                Ok(Some((frame, used))) => prop_assert_eq!(up(&frame), &input[..used]),
                Ok(None) => {}
                Err(error) => prop_assert_eq!(error.kind(), ErrorKind::Integrity),
            }
        }
    }

    #[test]
    fn runs_are_the_bytes_of_a_naive_walk(
        dims in prop::collection::vec((0_u64..5, -6_i64..7), 0..5),
        itemsize in 1_u64..5,
        first in any::<prop::sample::Index>(),
    ) {
        let (shape, strides): (Vec<u64>, Vec<i64>) = dims.into_iter().unzip();
        let strided = Strided::new(&shape, &strides, itemsize).unwrap();
        // Every element, in row-major order, relative to the first.
        let mut want: Vec<i64> = vec![0];
        for (&extent, &stride) in shape.iter().zip(&strides) {
            let steps = (0..extent.cast_signed()).map(|at| at * stride * itemsize.cast_signed());
            let steps: Vec<i64> = steps.collect();
            want = want.iter().flat_map(|base| steps.iter().map(move |step| base + step)).collect();
        }
        let bytes = |at: &i64| *at..*at + itemsize.cast_signed();
        let want: Vec<i64> = want.iter().flat_map(bytes).collect();
        let lowest = want.iter().min().copied().unwrap_or(0);
        let highest = want.iter().max().map_or(0, |at| at + 1);
        prop_assert_eq!(strided.below().cast_signed(), -lowest);
        prop_assert_eq!(strided.reach().cast_signed(), highest - lowest);
        prop_assert_eq!(strided.nbytes(), want.len() as u64);
        let run = strided.run_bytes();
        let got = |first| -> Vec<i64> {
            strided.offsets(first).flat_map(|at| at..at + run).map(|at| at.cast_signed() + lowest).collect()
        };
        prop_assert_eq!(&got(0), &want);
        prop_assert_eq!(strided.is_dense(), strided.runs() <= 1 || strided.dims().is_empty());
        let first = first.index(strided.runs() as usize + 1) as u64;
        prop_assert_eq!(got(first), &want[(first * run) as usize..]);
    }
}

#[test]
fn tensors_that_reach_past_memory_are_refused() {
    let far = [
        (&[2][..], &[i64::MAX][..], 2),
        (&[u64::MAX], &[0], 2),
        (&[3], &[i64::MIN], 1),
        (&[2, 2], &[i64::MAX / 2, i64::MIN / 2], 2),
        (&[1, 2], &[1], 1),
        (&[1], &[1], 0),
        (&[1; 33], &[1; 33], 1),
    ];
    for (shape, strides, itemsize) in far {
        let refused = Strided::new(shape, strides, itemsize).expect_err("refused");
        assert_eq!(refused.kind(), ErrorKind::Layout, "{shape:?} {strides:?}");
    }
}
