//! Handshakes: agreement, every kind of refusal, and answers that belong to somebody else.

use core::time::Duration;

use pdkv_core::dtype::DType;
use pdkv_core::id::{CacheId, Incarnation, RegionId, SessionToken};
use pdkv_core::layout::{KvLayout, KvLayoutParts, LayerLayout, Plane};
use pdkv_core::session::{
    Connecting, Established, MAX_VERSION, MIN_VERSION, STEP_TIMEOUT, accept, check_caches, features,
};
use pdkv_core::shard::Shard;
use pdkv_core::wire::{CacheAdvert, Hello, HelloAck, HostFacts, Message};
use pdkv_core::{Error, ErrorKind, Retry};

const NOW: Duration = Duration::from_secs(1);
const TOKEN: SessionToken = SessionToken::new([7; 16]);

fn hello(name: &str, life: u8) -> Hello {
    Hello {
        min_version: MIN_VERSION,
        max_version: MAX_VERSION,
        features: features::OURS,
        name: name.to_owned(),
        incarnation: Incarnation::new([life; 16]),
        address: String::new(),
        host: HostFacts::default(),
        peer_timeout: Duration::from_secs(5),
        heartbeat: Duration::from_secs(1),
        regions: Vec::new(),
        caches: Vec::new(),
        attempt: [life; 16],
    }
}

/// The answer of an honest peer, altered.
fn answer(spoil: impl FnOnce(&mut HelloAck)) -> Result<Established, Error> {
    let connecting = Connecting::new(NOW, hello("decode", 1), STEP_TIMEOUT);
    let Ok((Message::HelloAck(mut ack), _)) = accept(&hello("prefill", 2), TOKEN, hello("decode", 1)) else {
        panic!("an honest hello is accepted");
    };
    spoil(&mut ack);
    connecting.answered(NOW, Message::HelloAck(ack))
}

#[test]
fn both_sides_agree() {
    let established = answer(|_| {}).expect("agrees");
    assert_eq!(
        (established.version, established.features),
        (MAX_VERSION, features::OURS)
    );
    assert_eq!(
        (established.token, established.remote.name.as_str()),
        (TOKEN, "prefill")
    );
    assert_eq!(established.remote_peer().incarnation, Incarnation::new([2; 16]));
}

#[test]
fn the_highest_common_version_is_chosen_and_none_is_a_refusal_that_says_both() {
    let newer = Hello {
        max_version: MAX_VERSION + 5,
        features: features::OURS | 1 << 60,
        ..hello("decode", 1)
    };
    let (_, established) = accept(&hello("prefill", 2), TOKEN, newer).expect("overlap");
    assert_eq!(
        (established.version, established.features),
        (MAX_VERSION, features::OURS)
    );

    let future = Hello {
        min_version: 90,
        max_version: 99,
        features: 0,
        ..hello("decode", 1)
    };
    let (message, error) = accept(&hello("prefill", 2), TOKEN, future).expect_err("no overlap");
    assert_eq!(error.kind(), ErrorKind::Handshake);
    for part in ["version", "90..=99", "features"] {
        assert!(error.message().contains(part), "{error}");
    }
    let connecting = Connecting::new(NOW, hello("decode", 1), STEP_TIMEOUT);
    let seen = connecting.answered(NOW, message).expect_err("refused");
    assert!(
        seen.message().contains("90..=99"),
        "the connecting side sees why: {seen}"
    );
}

#[test]
fn an_answer_with_an_empty_identity_or_of_another_attempt_may_be_tried_again() {
    type Spoil = fn(&mut HelloAck);
    let stale: [(&str, Spoil); 4] = [
        ("name", |ack| ack.hello.name.clear()),
        ("incarnation", |ack| ack.hello.incarnation = Incarnation::new([0; 16])),
        ("attempt", |ack| ack.hello.attempt = [9; 16]),
        ("token", |ack| ack.token = SessionToken::new([0; 16])),
    ];
    for (field, spoil) in stale {
        let error = answer(spoil).expect_err(field);
        assert!(
            error.kind() == ErrorKind::Handshake && error.message().starts_with(field),
            "{error}"
        );
        assert_eq!(error.retry(), Retry::Later, "{field}");
    }
    let lasting: [(&str, Spoil); 4] = [
        ("version", |ack| ack.version = 77),
        ("features", |ack| ack.features |= 1 << 50),
        ("peer_timeout", |ack| ack.hello.peer_timeout = Duration::ZERO),
        ("heartbeat", |ack| ack.hello.heartbeat = Duration::ZERO),
    ];
    for (field, spoil) in lasting {
        let error = answer(spoil).expect_err(field);
        assert!(
            error.message().contains(field) && error.retry() == Retry::Never,
            "{error}"
        );
    }
}

#[test]
fn every_fault_is_listed() {
    let error = answer(|ack| {
        ack.hello.name.clear();
        ack.hello.attempt = [9; 16];
        ack.version = 77;
    });
    let error = error.expect_err("three faults");
    for field in ["name", "attempt", "version"] {
        assert!(error.message().contains(field), "{error}");
    }
}

#[test]
fn a_late_or_foreign_answer_is_not_taken() {
    let connecting = Connecting::new(NOW, hello("decode", 1), STEP_TIMEOUT);
    let (ack, _) = accept(&hello("prefill", 2), TOKEN, hello("decode", 1)).expect("accepts");
    let late = connecting.answered(connecting.deadline() + Duration::from_nanos(1), ack);
    assert_eq!(late.expect_err("late").kind(), ErrorKind::PeerUnreachable);
    let foreign = connecting.answered(NOW, connecting.hello()).expect_err("an echo");
    assert_eq!(foreign.kind(), ErrorKind::Handshake);
}

fn cache(dtype: DType, num_blocks: u32, model: &str) -> CacheAdvert {
    let layer = LayerLayout {
        planes: vec![Plane { region: 0, offset: 0 }],
        block_stride: 64,
        head_stride: 0,
        token_stride: 16,
    };
    let layout = KvLayout::from_parts(KvLayoutParts {
        dtype,
        num_blocks,
        num_heads: 1,
        block_tokens: 4,
        token_rows: 4,
        content_bytes: 16,
        layers: vec![layer],
        layer_names: vec!["l".to_owned()],
        region_bytes: vec![4096],
    });
    let layout = layout.expect("a valid layout");
    let shard = Shard::whole(1, 1);
    let fingerprint = pdkv_core::digest::fingerprint(model, &layout, &shard);
    CacheAdvert {
        id: CacheId(1),
        layout,
        regions: vec![RegionId(1)],
        shard,
        fingerprint,
        model: model.to_owned(),
    }
}

#[test]
fn caches_that_mean_the_same_match_and_others_are_told_apart_by_every_field() {
    check_caches(&cache(DType::F16, 8, "m"), &cache(DType::F16, 64, "m")).expect("places don't matter");
    let error = check_caches(&cache(DType::F16, 8, "m"), &cache(DType::BF16, 8, "n")).expect_err("differ");
    assert_eq!(error.kind(), ErrorKind::Handshake);
    for part in ["model", "`m`", "`n`", "dtype", "float16", "bfloat16"] {
        assert!(error.message().contains(part), "{error}");
    }
    let ours = cache(DType::F16, 8, "m");
    let mut theirs = cache(DType::F16, 8, "m");
    theirs.shard.total_layers = 2;
    theirs.fingerprint = pdkv_core::digest::fingerprint("m", &theirs.layout, &theirs.shard);
    let error = check_caches(&ours, &theirs).expect_err("another part of the model");
    assert!(error.message().contains("shard.total_layers"), "{error}");
}
