//! Frames of the side channel: what comes back, what is refused, and bytes that never change.

use pdkv_core::ErrorKind;
use pdkv_core::id::{RegionId, TransferId};
use pdkv_core::lane::{Carrier, Manner};
use proptest::prelude::*;

use crate::transport::request::{MAX_SPANS, Request, Target, Verb, WireSpan};
use crate::transport::ucx::codec::{Frame, HEADER, MAGIC, MAX_BLOB, MAX_TEXT, Mode};

fn round(frame: &Frame) -> Frame {
    let mut raw = Vec::new();
    frame.encode(&mut raw);
    let header = raw[..HEADER].try_into().unwrap();
    let (kind, len) = Frame::header(&header).unwrap();
    assert_eq!(raw.len(), HEADER + len, "{frame:?}");
    Frame::body(kind, &raw[HEADER..]).unwrap()
}

fn frames() -> Vec<Frame> {
    let claim = Target::Claim {
        transfer: TransferId(7),
        first_unit: 1 << 40,
        units: 3,
    };
    let request = |target| Request {
        verb: Verb::Put,
        target,
        bytes: 4096,
    };
    vec![
        Frame::Offer {
            manner: Manner::OneSided,
            mode: Mode::Peer,
            address: vec![7; MAX_BLOB],
        },
        Frame::Accept {
            base: 1 << 47,
            address: vec![1; MAX_BLOB],
            key: vec![2; MAX_BLOB],
        },
        Frame::Decline {
            last: true,
            reason: "no".to_owned(),
        },
        Frame::Verdict {
            carrier: Carrier::Kernel,
            text: "cma".to_owned(),
        },
        Frame::Ready,
        Frame::WantKey { region: RegionId(9) },
        Frame::Key {
            region: RegionId(9),
            base: 4096,
            len: 1 << 30,
            key: vec![3; 9],
        },
        Frame::NoKey {
            region: RegionId(9),
            reason: String::new(),
        },
        Frame::Ask {
            id: 1,
            request: request(claim),
            spans: Vec::new(),
        },
        Frame::Ask {
            id: 2,
            request: request(Target::Spans { count: 2 }),
            spans: vec![5; 2 * WireSpan::SIZE],
        },
        Frame::Go { id: 1 },
        Frame::Never { id: u64::MAX },
        Frame::Answer {
            id: 1,
            code: 0,
            bytes: 4096,
            text: String::new(),
        },
        Frame::Land {
            id: 3,
            region: RegionId(9),
        },
        Frame::Landed {
            id: 3,
            reason: "no".to_owned(),
        },
    ]
}

#[test]
fn every_frame_comes_back() {
    for frame in frames() {
        assert_eq!(round(&frame), frame);
    }
}

#[test]
fn frames_have_the_bytes_they_always_had() {
    let bytes: Vec<String> = [
        Frame::Offer {
            manner: Manner::ActiveMessages,
            mode: Mode::Peer,
            address: vec![0xAB, 0xCD],
        },
        Frame::Verdict {
            carrier: Carrier::Kernel,
            text: "cma".to_owned(),
        },
        Frame::WantKey { region: RegionId(9) },
        Frame::Answer {
            id: 7,
            code: 3,
            bytes: 4096,
            text: "no".to_owned(),
        },
        Frame::Land {
            id: 7,
            region: RegionId(9),
        },
        Frame::Landed {
            id: 7,
            reason: "no".to_owned(),
        },
    ]
    .iter()
    .map(|frame| {
        let mut raw = Vec::new();
        frame.encode(&mut raw);
        pdkv_core::hex::encode(&raw)
    })
    .collect();
    let golden = [
        "504b4455010000000a000000000000000101000000000000abcd",
        "504b4455040000000b000000000000000100000000000000636d61",
        "504b44550600000008000000000000000900000000000000",
        "504b44550c0000001a0000000000000007000000000000000300000000000000001000000000000\
         06e6f",
        "504b44550d000000100000000000000007000000000000000900000000000000",
        "504b44550e0000000a0000000000000007000000000000006e6f",
    ];
    assert_eq!(bytes, golden);
}

#[test]
fn a_long_text_is_cut_between_characters() {
    let frame = Frame::Decline {
        last: false,
        reason: "ä".repeat(MAX_TEXT),
    };
    let Frame::Decline { reason, .. } = round(&frame) else {
        panic!("another frame")
    };
    assert_eq!(reason.len(), MAX_TEXT);
}

#[test]
fn lengths_beyond_the_caps_are_refused_at_the_header() {
    for (kind, len) in [
        (1, 8 + MAX_BLOB + 1),
        (1, 7),
        (2, 16 + 2 * MAX_BLOB + 1),
        (5, 1),
        (6, 9),
        (7, 24 + MAX_BLOB + 1),
        (9, 8 + Request::SIZE + MAX_SPANS * WireSpan::SIZE + 1),
        (12, u32::MAX as usize),
        (13, 15),
        (13, 17),
        (14, 7),
        (14, 8 + MAX_TEXT + 1),
        (15, 0),
        (0, 0),
    ] {
        let mut raw = [0; HEADER];
        raw[0..4].copy_from_slice(&MAGIC.to_le_bytes());
        raw[4] = kind;
        raw[8..12].copy_from_slice(&(len as u32).to_le_bytes());
        assert_eq!(
            Frame::header(&raw).unwrap_err().kind(),
            ErrorKind::Integrity,
            "{kind} {len}"
        );
    }
}

proptest! {
    #[test]
    fn any_bytes_are_a_frame_that_encodes_to_them_or_a_refusal(
        mut raw in prop::collection::vec(any::<u8>(), HEADER..400),
        kind in 0_u8..16,
        near in any::<bool>(),
    ) {
        let body = raw.len() - HEADER;
        if near {
            raw[0..4].copy_from_slice(&MAGIC.to_le_bytes());
            raw[4] = kind;
            raw[5..8].fill(0);
            raw[8..12].copy_from_slice(&(body as u32).to_le_bytes());
            raw[12..16].fill(0);
            // Otherwise hardly any word in the body would have a legal value.
            for byte in raw[HEADER..].iter_mut().take(16) {
                *byte &= 1;
            }
        }
        let header: [u8; HEADER] = raw[..HEADER].try_into().unwrap();
        let Ok((kind, len)) = Frame::header(&header) else { return Ok(()) };
        prop_assert!(len <= 16 + 2 * MAX_BLOB);
        if len != body {
            return Ok(());
        }
        if let Ok(frame) = Frame::body(kind, &raw[HEADER..]) {
            let mut again = Vec::new();
            frame.encode(&mut again);
            prop_assert_eq!(again, raw);
        }
    }
}
