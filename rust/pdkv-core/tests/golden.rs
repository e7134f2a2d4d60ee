//! The bytes of every message, fixed: what one release writes, all others read.
//!
//! A difference here is a change of the protocol. New fields get new tags and new fixtures; an old
//! fixture is never edited.

mod common;

use std::time::Duration;

use pdkv_core::block_table::BlockTable;
use pdkv_core::dtype::DType;
use pdkv_core::error::ErrorKind;
use pdkv_core::id::{CacheId, ExportId, Incarnation, RegionId, SessionToken, TransferId};
use pdkv_core::layout::{KvLayout, KvLayoutParts, LayerLayout, Plane};
use pdkv_core::plan::WireOrder;
use pdkv_core::reference::{ExportKind, Reference};
use pdkv_core::shard::Shard;
use pdkv_core::wire::{
    Abandon, Ack, Advertise, CacheAdvert, Claim, ClaimStatus, DeviceAdvert, Done, Fault, Goodbye, Grant,
    HandshakeRefusal, Hello, HelloAck, HostFacts, Message, Nack, Notify, Ping, Pong, Probe, Refuse, RegionAdvert,
    Reject, Renew, Renewed, Revoke, SharedExtent, Status, StatusReply, StreamHello, StreamPurpose, Unknown, Withdraw,
    encode,
};

const MS: Duration = Duration::from_millis(1);

fn region() -> RegionAdvert {
    RegionAdvert {
        id: RegionId(1),
        len: 1 << 33,
        base_address: 0x7f00_0000_0000,
        shared: Some(SharedExtent {
            offset: 4096,
            len: 8192,
        }),
        raw_access: true,
        name: "pool".to_owned(),
        device: None,
    }
}

fn device_region() -> RegionAdvert {
    RegionAdvert {
        id: RegionId(3),
        base_address: RegionAdvert::NOWHERE,
        shared: None,
        device: Some(DeviceAdvert {
            uuid: [0x99; 16],
            sealed: "MIG".to_owned(),
            movable: false,
        }),
        ..region()
    }
}

fn cache() -> CacheAdvert {
    let layer = |offset| LayerLayout {
        planes: vec![
            Plane { region: 0, offset },
            Plane {
                region: 0,
                offset: offset + 4096,
            },
        ],
        block_stride: 512,
        head_stride: 256,
        token_stride: 16,
    };
    let parts = KvLayoutParts {
        dtype: DType::BF16,
        num_blocks: 8,
        num_heads: 2,
        block_tokens: 16,
        token_rows: 16,
        content_bytes: 16,
        layers: vec![layer(0), layer(8192)],
        layer_names: vec!["layers.0".to_owned(), "layers.1".to_owned()],
        region_bytes: vec![16_384],
    };
    CacheAdvert {
        id: CacheId(2),
        layout: KvLayout::from_parts(parts).expect("a valid layout"),
        regions: vec![RegionId(1)],
        shard: Shard {
            tp_rank: 1,
            tp_size: 2,
            ..Shard::whole(2, 2)
        },
        fingerprint: [0xf1; 32],
        model: "tiny".to_owned(),
    }
}

fn hello() -> Hello {
    Hello {
        min_version: 1,
        max_version: 2,
        features: 3,
        name: "decode-0".to_owned(),
        incarnation: Incarnation::new([0x11; 16]),
        address: "127.0.0.1:4000".to_owned(),
        host: HostFacts {
            pid: 4242,
            boot_id: "6d1f".to_owned(),
            pid_namespace: 4_026_531_836,
            local_socket: "pdkv-11".to_owned(),
            probe: Some(Probe {
                address: 0x7f00_dead_0000,
                nonce: [0x22; 32],
            }),
        },
        peer_timeout: 5000 * MS,
        heartbeat: 1000 * MS,
        regions: vec![region()],
        caches: vec![cache()],
        attempt: [0x33; 16],
    }
}

fn reference() -> Reference {
    Reference {
        version: 1,
        kind: ExportKind::Export,
        engine: "prefill-0".to_owned(),
        address: "127.0.0.1:4001".to_owned(),
        incarnation: Incarnation::new([0x44; 16]),
        export_id: ExportId::new([0x55; 16]),
        cache: CacheId(2),
        digest: vec![0x66; 4],
        fingerprint: [0xf1; 32],
        num_tokens: 100,
        num_blocks: 7,
        consumers: 2,
        tag: [0; 16],
    }
    .sealed(&[0x77; 32])
}

fn fault() -> Fault {
    Fault {
        kind: ErrorKind::ReferenceExpired,
        message: "over".to_owned(),
        hint: "renew".to_owned(),
    }
}

fn messages() -> Vec<(&'static str, Message)> {
    let transfer = TransferId(300);
    let claim = Claim {
        transfer,
        reference: reference(),
        expected_digest: Some(vec![0x66; 4]),
        expected_fingerprint: [0xf1; 32],
        first_block: 1,
        num_blocks: 5,
        first_layer: 0,
        num_layers: 2,
        transport: "tcp".to_owned(),
        remaining: 30_000 * MS,
        wants_table: true,
        order: Some(WireOrder::BLOCK_MAJOR),
    };
    let grant = Grant {
        transfer,
        cache: CacheId(2),
        num_blocks: 5,
        blocks: Some(BlockTable::from_ids(&[9, 10, 11, 3, 4_000_000_000])),
        remaining: 29_000 * MS,
    };
    let status = |status| Message::StatusReply(StatusReply { transfer, status });
    let ack = HelloAck {
        hello: hello(),
        version: 1,
        features: 3,
        token: SessionToken::new([0x88; 16]),
    };
    let refusal = HandshakeRefusal {
        kind: ErrorKind::Handshake,
        message: "version: nothing in common".to_owned(),
    };
    let stream = StreamHello {
        token: SessionToken::new([0x88; 16]),
        incarnation: Incarnation::new([0x11; 16]),
        index: 3,
        purpose: StreamPurpose::Data,
    };
    let lane = StreamHello {
        purpose: StreamPurpose::UcxLane,
        ..stream
    };
    let pipe = StreamHello {
        purpose: StreamPurpose::Pipe,
        ..stream
    };
    vec![
        ("hello", Message::Hello(Box::new(hello()))),
        ("hello_ack", Message::HelloAck(Box::new(ack))),
        ("handshake_refusal", Message::HandshakeRefusal(refusal)),
        ("stream_hello", Message::StreamHello(stream)),
        ("stream_hello_lane", Message::StreamHello(lane)),
        ("stream_hello_pipe", Message::StreamHello(pipe)),
        (
            "advertise",
            Message::Advertise(Advertise {
                regions: vec![region()],
                caches: vec![cache()],
            }),
        ),
        (
            "advertise_device",
            Message::Advertise(Advertise {
                regions: vec![device_region()],
                caches: Vec::new(),
            }),
        ),
        ("advertise_movable_device", {
            let mut region = device_region();
            region.device = region.device.map(|device| DeviceAdvert {
                movable: true,
                ..device
            });
            Message::Advertise(Advertise {
                regions: vec![region],
                caches: Vec::new(),
            })
        }),
        (
            "withdraw",
            Message::Withdraw(Withdraw {
                regions: vec![RegionId(1), RegionId(900)],
                caches: vec![CacheId(2)],
            }),
        ),
        ("claim", Message::Claim(Box::new(claim.clone()))),
        (
            "claim_bare",
            Message::Claim(Box::new(Claim {
                expected_digest: None,
                order: None,
                wants_table: false,
                ..claim
            })),
        ),
        ("grant", Message::Grant(grant.clone())),
        ("grant_bare", Message::Grant(Grant { blocks: None, ..grant })),
        (
            "refuse",
            Message::Refuse(Refuse {
                transfer,
                fault: fault(),
            }),
        ),
        (
            "done",
            Message::Done(Done {
                transfer,
                bytes: 1 << 40,
            }),
        ),
        ("ack", Message::Ack(Ack { transfer })),
        (
            "nack",
            Message::Nack(Nack {
                transfer,
                fault: fault(),
            }),
        ),
        (
            "abandon",
            Message::Abandon(Abandon {
                transfer,
                reason: ErrorKind::TransferTimeout,
            }),
        ),
        (
            "revoke",
            Message::Revoke(Revoke {
                transfer,
                fault: fault(),
            }),
        ),
        (
            "renew",
            Message::Renew(Box::new(Renew {
                request: 7,
                reference: reference(),
                extend: 60_000 * MS,
            })),
        ),
        (
            "renewed",
            Message::Renewed(Renewed {
                request: 7,
                result: Ok(60_000 * MS),
            }),
        ),
        (
            "renewed_refused",
            Message::Renewed(Renewed {
                request: 7,
                result: Err(fault()),
            }),
        ),
        (
            "reject",
            Message::Reject(Box::new(Reject {
                reference: reference(),
                consumer: 1,
            })),
        ),
        ("status", Message::Status(Status { transfer })),
        ("status_unknown", status(ClaimStatus::Unknown)),
        ("status_active", status(ClaimStatus::Active)),
        ("status_completed", status(ClaimStatus::Completed)),
        ("status_failed", status(ClaimStatus::Failed(fault()))),
        (
            "notify",
            Message::Notify(Notify {
                bytes: b"request-7".to_vec(),
            }),
        ),
        ("ping", Message::Ping(Ping { sequence: 8 })),
        ("pong", Message::Pong(Pong { sequence: 8 })),
        (
            "goodbye",
            Message::Goodbye(Goodbye {
                reason: "closed".to_owned(),
            }),
        ),
        ("unknown_critical", Message::Unknown(Unknown { critical: true })),
    ]
}

/// Lines of 32 bytes.
fn dump(frame: &[u8]) -> String {
    frame
        .chunks(32)
        .map(|line| pdkv_core::hex::encode(line) + "\n")
        .collect()
}

#[test]
fn every_message_has_the_bytes_it_always_had() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden");
    let messages = messages();
    for (name, message) in &messages {
        let frame = encode(message).expect("small");
        let path = format!("{folder}/{name}.hex");
        let golden = std::fs::read_to_string(&path).unwrap_or_default();
        assert_eq!(
            dump(&frame),
            golden,
            "`{name}` changed on the wire, or its fixture is missing"
        );
        assert_eq!(&common::over_the_wire(message), message, "{name}");
    }
    let files = std::fs::read_dir(folder).expect("fixtures").count();
    assert_eq!(files, messages.len(), "each fixture belongs to a message");
    let kinds: std::collections::BTreeSet<_> = messages.iter().map(|(_, message)| message.name()).collect();
    assert_eq!(kinds.len(), 24, "each kind has a fixture");
}

#[test]
fn fields_and_kinds_of_later_releases_are_skipped() {
    use pdkv_core::wire::{FrameDecoder, MAX_FRAME};
    let decode = |body: &[u8]| {
        let mut decoder = FrameDecoder::new(MAX_FRAME);
        decoder.push(&(body.len() as u32).to_le_bytes());
        decoder.push(body);
        decoder.next().map(|message| message.expect("whole"))
    };
    // A ping with the later field 15, and a message of the later kind 100.
    let ping = [0xb2, 0x01, 4, 0x08, 8, 0x78, 1];
    assert_eq!(decode(&ping).expect("skipped"), Message::Ping(Ping { sequence: 8 }));
    // A stream that is for something this release has never heard of is none that it may serve.
    let token = [0x0a, 16].into_iter().chain([7; 16]);
    let stream: Vec<u8> = token.chain([0x12, 16]).chain([7; 16]).chain([0x20, 9]).collect();
    let frame = [&[0x2a, stream.len() as u8][..], &stream].concat();
    assert!(decode(&frame).expect_err("refused").message().contains("purpose `9`"));
    let later = [0xa2, 0x06, 2, 0x08, 1];
    assert_eq!(
        decode(&later).expect("skipped"),
        Message::Unknown(Unknown { critical: false })
    );
}

#[test]
fn large_frames_carry_one_grant_and_nothing_else() {
    use pdkv_core::wire::{FrameDecoder, HELLO_CAP, MAX_FRAME};
    let ids: Vec<u32> = (0..1_200_000u32).map(|n| n.wrapping_mul(2_654_435_761)).collect();
    let grant = Message::Grant(Grant {
        transfer: TransferId(1),
        cache: CacheId(1),
        num_blocks: ids.len() as u32,
        blocks: Some(BlockTable::from_ids(&ids)),
        remaining: MS,
    });
    assert!(encode(&grant).expect("fits").len() > HELLO_CAP);
    assert_eq!(common::over_the_wire(&grant), grant);

    let mut frame = ((HELLO_CAP + 2) as u32).to_le_bytes().to_vec();
    frame.extend([0x32, 0].repeat(HELLO_CAP / 2 + 1));
    let mut decoder = FrameDecoder::new(MAX_FRAME);
    decoder.push(&frame);
    assert!(decoder.next().is_err(), "two bytes must not become a whole advert each");

    let regions = vec![region(); 200_000];
    let error = encode(&Message::Advertise(Advertise {
        regions,
        caches: Vec::new(),
    }))
    .expect_err("too large");
    assert_eq!(error.kind(), ErrorKind::Capacity);
}
