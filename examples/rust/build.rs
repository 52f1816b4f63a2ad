fn main() -> std::io::Result<()> {
    let protos = ["octavo/v1/inference.proto", "google_rpc.proto", "grpc_health_v1.proto"];
    println!("cargo:rerun-if-changed=../../protos");
    println!("cargo:rerun-if-changed=../protos");
    prost_build::compile_protos(&protos, &["../../protos", "../protos"])
}
