#!/bin/sh
# build.sh OUT: in a root of Debian's bookworm, builds the servers of Kubernetes 1.20.2 from
# Debian's source package, by Debian's Go, without a network once the source is there. One line is
# changed: kubelets before 1.26 name a plugin's socket as the authority of their requests, which
# HTTP/2 libraries other than Go's refuse (kubernetes PR 112597 mended it).
set -eu
out=$1
mkdir -p /build
cd /build
sed -n 's/^deb /deb-src /p' /etc/apt/sources.list >/etc/apt/sources.list.d/source.list
apt-get -q -q -o Acquire::Check-Valid-Until=false update
apt-get source -q -q --download-only kubernetes
dpkg-source -x kubernetes_*.dsc src >/dev/null
grep -q '^kubernetes (1.20.5+really1.20.2-' src/debian/changelog
export GOPATH=/build/path GOCACHE=/build/cache GO111MODULE=off CGO_ENABLED=0 GOFLAGS= GOPROXY=off HOME=/build
PATH="/usr/lib/go-1.19/bin:$PATH"
builder="/usr/lib/go-1.19/bin/go"
mkdir -p "$GOPATH/src/k8s.io"
ln -s /build/src "$GOPATH/src/k8s.io/kubernetes"
cd "$GOPATH/src/k8s.io/kubernetes"
for file in "pkg/kubelet/cm/devicemanager/endpoint.go" \
    "pkg/kubelet/pluginmanager/operationexecutor/operation_generator.go"; do
    sed -i 's/grpc.DialContext(ctx, unixSocketPath,/& grpc.WithAuthority("localhost"),/' "$file"
    test "$(grep -c 'WithAuthority("localhost")' "$file")" = 1
done
# Debian's tree has no generated OpenAPI definitions.
"$builder" build -o /build/openapi-gen k8s.io/kubernetes/vendor/k8s.io/kube-openapi/cmd/openapi-gen
inputs=$(grep -rl --include="*.go" '^// +k8s:openapi-gen=true' staging/src pkg/apis cmd | xargs -n 1 dirname | sort -u |
    sed 's,^staging/src/,vendor/,; s,^,k8s.io/kubernetes/,' | paste -s -d ,)
/build/openapi-gen -i "$inputs" -p k8s.io/kubernetes/pkg/generated/openapi -O zz_generated.openapi \
    -h hack/boilerplate/boilerplate.generatego.txt -r /dev/null
version=k8s.io/kubernetes/vendor/k8s.io/component-base/version
flags="-s -w -X $version.gitVersion=v1.20.2 -X $version.gitMajor=1 -X $version.gitMinor=20"
flags="$flags -X $version.gitTreeState=clean -X $version.gitCommit=debian"
for name in kube-apiserver kube-scheduler kubelet kubectl; do
    "$builder" build -p 2 -ldflags "$flags" -o "$out/$name" "k8s.io/kubernetes/cmd/$name"
done
